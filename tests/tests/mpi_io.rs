//! MPI programs that write one file from four hosts: ROMIO, OMPIO, HDF5 and NetCDF-4 through mounts with `layout=log`.
//!
//! Each rank runs in a mount namespace of its own, where the job's directory is the mount of its host. What the ranks
//! wrote is read by other numbers of ranks, and compared with what one rank wrote in a plain directory.
//!
//! Needs root, FUSE and Debian's openmpi-bin, libnetcdf-mpi-dev, python3-h5py-mpi and python3-mpi4py.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use firn_tests::command::{Outcome, run};
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::{FirnMount, Sandbox};

/// Held while ranks run: they poll, and two jobs at once on two CPUs take minutes in place of seconds.
static ONE_JOB: Mutex<()> = Mutex::new(());

const HOSTS: usize = 4;
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,layout=log";
const PATTERNS: [&str; 3] = ["strided", "segmented", "nested"];
const ACCESSES: [&str; 2] = ["collective", "independent"];

/// The two implementations of MPI-IO in Open MPI, and how each is told to write nothing but the bytes it was given.
const LIBRARIES: [Library; 2] = [
    Library {
        component: "ompio",
        hints: &[],
    },
    Library {
        component: "romio321",
        hints: &["romio_ds_write=disable"],
    },
];

struct Library {
    /// Of Open MPI's framework `io`.
    component: &'static str,
    hints: &'static [&'static str],
}

/// Source of a program of these tests.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
}

/// Compiles one of them into the sandbox.
fn compile(sandbox: &Sandbox, name: &str, flags: &str) -> PathBuf {
    let program = sandbox.join(name);
    let script = format!(r#"mpicc -O1 -Wall -Werror -o "$0" "$1" {flags}"#);
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(&program);
    run(command.arg(source(&format!("{name}.c")))).ok();
    program
}

/// Hosts of a job, each with a directory that shows the same files.
struct Hosts<'a> {
    shared: &'a Sandbox,
    /// Where every rank finds the directory of its host.
    common: PathBuf,
    dirs: Vec<PathBuf>,
}

impl<'a> Hosts<'a> {
    fn new(shared: &'a Sandbox, dirs: Vec<PathBuf>) -> Self {
        let common = shared.mkdir("common");
        Self {
            shared,
            common,
            dirs,
        }
    }

    /// Hosts that have one plain directory.
    fn plain(shared: &'a Sandbox) -> Self {
        Self::new(shared, vec![shared.mkdir("plain"); HOSTS])
    }

    /// `mpirun` of a program and its arguments with so many ranks, dealt out to the hosts.
    fn run<S: AsRef<OsStr>>(&self, component: &str, ranks: usize, words: &[S]) -> Outcome {
        let mut command = Command::new("mpirun");
        self.shared.environment(&mut command);
        command
            .args(["--allow-run-as-root", "--oversubscribe", "-n"])
            .arg(ranks.to_string())
            .args(["--mca", "io", component])
            .args(["--mca", "fbtl_posix_write_datasieving", "false"])
            .env("ROMIO_HINTS", self.hints())
            .env("OMP_NUM_THREADS", "1")
            .arg(source("on_host.sh"))
            .arg(&self.common)
            .args(&self.dirs)
            .arg("--")
            .args(words);
        let _alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
        run(&mut command)
    }

    /// What ROMIO is told where the program has no hints of its own: libraries between it and the program.
    fn hints(&self) -> PathBuf {
        let file = self.shared.join("romio-hints");
        fs::write(&file, "romio_ds_write disable\n").expect("write the hints");
        file
    }

    /// The same, where the ranks have to agree.
    #[track_caller]
    fn agree<S: AsRef<OsStr>>(&self, component: &str, ranks: usize, words: &[S]) {
        let outcome = self.run(component, ranks, words).ok();
        let agreed = format!("{ranks} ranks agree");
        assert!(outcome.stdout.contains(&agreed), "{outcome}");
    }

    /// Path of a file as the ranks see it.
    fn file(&self, name: &str) -> String {
        self.common.join(name).to_string_lossy().into_owned()
    }
}

/// What a program and its arguments write with one rank in a plain directory; they are given the file.
fn written_by_one(shared: &Sandbox, words: impl FnOnce(String) -> Vec<String>) -> Vec<u8> {
    let file = shared.join("of-one").to_string_lossy().into_owned();
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "-n", "1"])
        .args(words(file.clone()));
    let alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    run(&mut command).ok();
    drop(alone);
    let bytes = read(Path::new(&file));
    fs::remove_file(&file).expect("remove");
    bytes
}

/// Writes a file with each library, pattern and access, and reads it with other numbers of ranks; `arrived` is where
/// it is then.
fn write_and_read(hosts: &Hosts<'_>, arrived: &Path) {
    let program = compile(hosts.shared, "mpi_io", "");
    let program = program.to_string_lossy().into_owned();
    let expected = written_by_one(hosts.shared, |file| {
        let words = [&program, "write", &file, "segmented", "collective"];
        words.map(str::to_owned).into()
    });
    for library in LIBRARIES {
        for pattern in PATTERNS {
            for access in ACCESSES {
                let name = format!("{}-{pattern}-{access}", library.component);
                let file = hosts.file(&name);
                let words = |verb: &str| {
                    let mut words = vec![program.clone(), verb.to_owned(), file.clone()];
                    words.extend([pattern, access].map(str::to_owned));
                    words.extend(library.hints.iter().map(|&hint| hint.to_owned()));
                    words
                };
                hosts.agree(library.component, HOSTS, &words("write"));
                for ranks in [3, 2] {
                    hosts.agree(library.component, ranks, &words("read"));
                }
                assert_same_bytes(&name, &read(&arrived.join(&name)), &expected);
            }
        }
    }
}

#[test]
fn mpi_io_of_four_ranks_is_right_on_a_plain_directory() {
    let shared = Sandbox::new("mpi-plain");
    let hosts = Hosts::plain(&shared);
    write_and_read(&hosts, &shared.join("plain"));
}

/// Mounts of four hosts over the `backing` of a sandbox, for the time of a call.
fn with_mounts(name: &str, check: impl FnOnce(&Hosts<'_>, &Path)) {
    let shared = Sandbox::new(name);
    let sandboxes: Vec<Sandbox> = (0..HOSTS)
        .map(|at| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}")))
        .collect();
    let backing = shared.join("backing");
    let mounts: Vec<FirnMount<'_>> = sandboxes
        .iter()
        .map(|host| FirnMount::over(host, &backing, OPTIONS))
        .collect();
    let dirs = mounts.iter().map(|mount| mount.path().to_owned());
    check(&Hosts::new(&shared, dirs.collect()), &backing);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    let containers = fs::read_dir(backing.join(".firn/log")).expect("list the logs");
    let names = containers.map(|entry| entry.expect("an entry").file_name());
    let left: Vec<_> = names
        .filter(|name| !name.to_string_lossy().starts_with("host-"))
        .collect();
    assert!(left.is_empty(), "logs are left: {left:?}");
}

/// Proves S-log-60, S-log-61.
#[test]
fn mpi_io_of_four_hosts_ends_in_the_file_of_one() {
    with_mounts("mpi-log", write_and_read);
}

/// Proves S-log-62.
#[test]
fn hdf5_of_four_hosts_has_what_one_host_would_have_written() {
    let script = source("mpi_h5.py").to_string_lossy().into_owned();
    let words = |verb: &str, file: &str, access: &str| -> Vec<String> {
        ["/usr/bin/python3", &script, verb, file, access]
            .map(str::to_owned)
            .into()
    };
    let list = |file: &Path| {
        let mut command = Command::new("/usr/bin/python3");
        run(command.arg(&script).arg("list").arg(file)).ok();
    };
    let plain = Sandbox::new("mpi-h5-plain");
    let expected = written_by_one(&plain, |file| words("write", &file, "collective"));
    with_mounts("mpi-h5", |hosts, backing| {
        for library in LIBRARIES {
            for access in ACCESSES {
                let name = format!("{}-{access}.h5", library.component);
                let file = hosts.file(&name);
                hosts.agree(library.component, HOSTS, &words("write", &file, access));
                for ranks in [3, 2] {
                    hosts.agree(library.component, ranks, &words("read", &file, access));
                }
                list(&backing.join(&name));
                assert_same_bytes(&name, &read(&backing.join(&name)), &expected);
            }
        }
    });
}

/// Proves S-log-62.
#[test]
fn netcdf_of_four_hosts_is_read_by_other_numbers_of_ranks() {
    const FLAGS: &str = "-I/usr/lib/$(gcc -print-multiarch)/netcdf/mpi/include -lnetcdf_mpi";
    with_mounts("mpi-nc", |hosts, backing| {
        let program = compile(hosts.shared, "mpi_nc", FLAGS);
        let program = program.to_string_lossy().into_owned();
        for access in ACCESSES {
            let words = |verb: &str, file: String| {
                vec![program.clone(), verb.to_owned(), file, access.to_owned()]
            };
            let expected = written_by_one(hosts.shared, |file| words("write", file));
            for library in LIBRARIES {
                let name = format!("{}-{access}.nc", library.component);
                let file = hosts.file(&name);
                hosts.agree(library.component, HOSTS, &words("write", file.clone()));
                for ranks in [3, 2] {
                    hosts.agree(library.component, ranks, &words("read", file.clone()));
                }
                // Without Firn.
                let plain = Hosts::new(hosts.shared, vec![backing.to_owned()]);
                plain.agree(library.component, 1, &words("read", file));
                assert_same_bytes(&name, &read(&backing.join(&name)), &expected);
            }
        }
    });
}
