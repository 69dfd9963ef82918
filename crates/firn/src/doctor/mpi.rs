//! Check for MPI libraries that use data sieving, which loses bytes when several hosts write one file.
//!
//! With data sieving, a library reads a range of a file, changes part of the range, and writes the whole range back.
//! This undoes what another host has written to the range in the meantime. Two I/O layers do so: ROMIO (of MPICH and
//! others) and OMPIO (of Open MPI). Each has a setting that turns data sieving off.
//!
//! The check sees variables and configuration files, but not the hints that a program sets by itself. Details:
//! docs/features/shared-files.md, "MPI-IO, HDF5 and NetCDF-4".

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use firn_format::quote::quoted_path;
use firn_process::{ExcessOutput, Limits};

use crate::doctor::fuse::find_program;
use crate::doctor::{CheckSubject, Finding, settings_in};

/// Timeout for `mpirun --version`.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(4);
const OUTPUT_BYTES_MAX: usize = 16 << 10;
/// Hint that turns data sieving off in ROMIO.
const ROMIO_HINT: &str = "romio_ds_write";
/// Parameter that turns data sieving off in OMPIO.
const OMPIO_SETTING: &str = "fbtl_posix_write_datasieving";
/// Part of each advice: the cases in which data sieving does no harm.
const HARMLESS_CASES: &str = "nothing to do with one host, or with a separate file for each rank";

/// Reports what the installed MPI library does, and what turns data sieving off.
pub(crate) fn check_mpi(_: &CheckSubject<'_>) -> Vec<Finding> {
    let Some(program) = ["mpirun", "mpiexec"].into_iter().find_map(find_program) else {
        return vec![Finding::ok("no mpirun in the PATH")];
    };
    let variable = |name: &str| std::env::var_os(name);
    let settings = MpiSettings {
        variable: &variable,
        open_mpi_files: parameter_files(),
    };
    let version_text = ask_version(&program);
    vec![judge_library(
        &quoted_path(&program),
        &version_text,
        &settings,
    )]
}

/// Returns what `mpirun --version` prints, or an empty text if it fails or exceeds its timeout.
fn ask_version(program: &Path) -> String {
    let mut command = Command::new(program);
    command.arg("--version");
    let limits = Limits {
        input: b"",
        output_bytes_max: OUTPUT_BYTES_MAX,
        excess: ExcessOutput::Discard,
        deadline: Instant::now() + COMMAND_TIMEOUT,
    };
    match firn_process::run(command, limits) {
        Ok(ended_child) => ended_child.text(),
        Err(_) => String::new(),
    }
}

/// Returns the files from which Open MPI reads parameters: the user's file and the system's.
fn parameter_files() -> Vec<PathBuf> {
    let mut files = Vec::new();
    if let Some(home) = std::env::var_os("HOME") {
        files.push(PathBuf::from(home).join(".openmpi/mca-params.conf"));
    }
    files.push(PathBuf::from("/etc/openmpi/openmpi-mca-params.conf"));
    files
}

/// Where the settings of MPI libraries are looked up.
struct MpiSettings<'a> {
    /// Looks up an environment variable.
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// Files with Open MPI's parameters, the most important one first.
    open_mpi_files: Vec<PathBuf>,
}

impl MpiSettings<'_> {
    /// Returns a parameter of Open MPI, or `None` if it is not set. Open MPI prefers a variable to its files.
    fn open_mpi_parameter(&self, key: &str) -> Option<String> {
        if let Some(value) = (self.variable)(&format!("OMPI_MCA_{key}")) {
            return Some(value.to_string_lossy().into_owned());
        }
        self.open_mpi_files
            .iter()
            .find_map(|file| value_in(file, key, '='))
    }

    /// Returns a hint for ROMIO from the file that the variable ROMIO_HINTS names, or `None` if it is not set.
    fn romio_hint(&self, key: &str) -> Option<String> {
        let file = PathBuf::from((self.variable)("ROMIO_HINTS")?);
        value_in(&file, key, ' ')
    }
}

/// Judges an MPI library. `name` names the program in the finding, and `version_text` is what `mpirun --version`
/// printed.
fn judge_library(name: &str, version_text: &str, settings: &MpiSettings<'_>) -> Finding {
    let is_open_mpi = version_text.contains("Open MPI") || version_text.contains("OpenRTE");
    if !is_open_mpi {
        return judge_romio(name, "ROMIO", settings);
    }
    match settings.open_mpi_parameter("io") {
        Some(layer) if layer.starts_with("romio") => {
            judge_romio(name, "Open MPI with ROMIO", settings)
        }
        _ => judge_ompio(name, settings),
    }
}

/// Judges Open MPI with its own I/O layer OMPIO. With data sieving, OMPIO writes back bytes that it has read, and so
/// undoes writes of other hosts.
fn judge_ompio(name: &str, settings: &MpiSettings<'_>) -> Finding {
    let data_sieving = settings.open_mpi_parameter(OMPIO_SETTING);
    let is_turned_off = data_sieving
        .is_some_and(|value| ["0", "false", "no", "disabled"].contains(&value.as_str()));
    if is_turned_off {
        return Finding::ok(format!(
            "{name}: Open MPI, whose OMPIO does not use data sieving for writes"
        ));
    }
    Finding::note(
        format!(
            "{name}: if several hosts write one file, Open MPI's OMPIO (data sieving) loses bytes of other hosts; with layout=log it is only slow"
        ),
        format!("`export OMPI_MCA_{OMPIO_SETTING}=false`; {HARMLESS_CASES}"),
    )
}

/// Judges a library with the I/O layer ROMIO. `library` names the library in the finding.
fn judge_romio(name: &str, library: &str, settings: &MpiSettings<'_>) -> Finding {
    if settings.romio_hint(ROMIO_HINT).as_deref() == Some("disable") {
        return Finding::ok(format!(
            "{name}: {library}, which does not use data sieving for writes (ROMIO_HINTS)"
        ));
    }
    Finding::note(
        format!(
            "{name}: if several hosts write one file, {library} (data sieving) loses bytes of other hosts; with layout=log it is only slow"
        ),
        format!(
            "`echo {ROMIO_HINT} disable > ~/romio-hints; export ROMIO_HINTS=~/romio-hints`; {HARMLESS_CASES}"
        ),
    )
}

/// Returns the value of the last line `key value` in a file, or `None` if there is no such line. `separator` or blanks
/// stand between key and value.
fn value_in(file: &Path, key: &str, separator: char) -> Option<String> {
    let settings = settings_in(file);
    let separators = [separator, ' ', '\t'];
    for setting in settings.iter().rev() {
        if let Some((found_key, value)) = setting.split_once(separators)
            && found_key == key
        {
            return Some(value.trim_matches(separators).to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    const OPEN_MPI: &str = "mpirun (Open MPI) 4.1.4";
    const MPICH: &str = "HYDRA build details:\n    Version: 4.0.2";

    fn verdict(version_text: &str, set: &[(&str, &str)], files: &[PathBuf]) -> Verdict {
        let variable = |name: &str| {
            let found = set.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| OsString::from(value))
        };
        let settings = MpiSettings {
            variable: &variable,
            open_mpi_files: files.to_vec(),
        };
        judge_library("mpirun", version_text, &settings).verdict
    }

    #[test]
    fn data_sieving_is_noted_until_it_is_turned_off() {
        let dir = tempfile::tempdir().unwrap();
        let hints = dir.path().join("hints");
        std::fs::write(&hints, "cb_nodes 2\nromio_ds_write disable\n").unwrap();
        let hints = hints.to_str().unwrap();
        let parameters = dir.path().join("mca-params.conf");
        std::fs::write(&parameters, "fbtl_posix_write_datasieving = false\n").unwrap();
        let off = ("OMPI_MCA_fbtl_posix_write_datasieving", "false");
        assert_eq!(verdict(OPEN_MPI, &[], &[]), Verdict::Note);
        assert_eq!(verdict(OPEN_MPI, &[off], &[]), Verdict::Ok);
        assert_eq!(verdict(OPEN_MPI, &[], &[parameters]), Verdict::Ok);
        let romio = ("OMPI_MCA_io", "romio321");
        assert_eq!(verdict(OPEN_MPI, &[off, romio], &[]), Verdict::Note);
        assert_eq!(
            verdict(OPEN_MPI, &[romio, ("ROMIO_HINTS", hints)], &[]),
            Verdict::Ok
        );
        assert_eq!(verdict(MPICH, &[], &[]), Verdict::Note);
        assert_eq!(verdict(MPICH, &[("ROMIO_HINTS", hints)], &[]), Verdict::Ok);
        assert_eq!(
            verdict(MPICH, &[("ROMIO_HINTS", "/missing")], &[]),
            Verdict::Note
        );
    }
}
