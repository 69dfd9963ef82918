//! Writes the files that a user asks for with `--output` and the like, such as reports and metrics.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Writes these bytes to a file.
///
/// A regular file is replaced, and a new file created, atomically: readers find either the old or the new content. An
/// existing file keeps its mode. Any other object (a device, a FIFO, a symbolic link) is opened and written, as by a
/// shell's `>`: the kernel then checks the permission to follow the link.
///
/// If the process is killed meanwhile, a temporary file remains, whose name begins with `.firn-`.
pub fn write(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let existing_permissions = match fs::symlink_metadata(file) {
        Ok(metadata) if metadata.is_file() => Some(metadata.permissions()),
        Ok(_) => return write_in_place(file, bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let dir = directory_of(file);
    // A missing directory is found here. An error of the temporary file would show that file's name.
    fs::metadata(dir)?;
    let mut temporary_file = tempfile::Builder::new()
        .prefix(".firn-")
        // The kernel subtracts the user's umask from this mode.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(dir)
        .map_err(|error| io::Error::from(error.kind()))?;
    if let Some(permissions) = existing_permissions {
        temporary_file.as_file().set_permissions(permissions)?;
    }
    temporary_file.write_all(bytes)?;
    temporary_file.persist(file)?;
    Ok(())
}

/// Returns the directory that a file is in, or would be in.
pub fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Opens the object with this name, and writes to it without replacing it.
fn write_in_place(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut opened: File = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(file)?;
    opened.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt as _, symlink};

    use super::*;

    #[test]
    fn a_regular_file_is_replaced_and_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("report.html");
        write(&file, b"first").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let old = File::open(&file).unwrap();
        write(&file, b"second").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"second");
        let mode = fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        assert_eq!(io::read_to_string(old).unwrap(), "first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn regression_a_link_and_a_device_stay_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        symlink("target", &link).unwrap();
        write(&link, b"page").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"page");

        let device = dir.path().join("null");
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            &device,
            rustix::fs::FileType::CharacterDevice,
            0o666.into(),
            rustix::fs::makedev(1, 3),
        );
        // Only root may create devices, so the test skips this part for other users.
        if made.is_ok() {
            let _ = write(&device, b"page");
            let kind = fs::symlink_metadata(&device).unwrap().file_type();
            assert!(kind.is_char_device());
        }
    }

    #[test]
    fn a_directory_that_is_missing_is_told_without_a_name_of_ours() {
        let error = write(Path::new("/nonexistent/report.html"), b"").unwrap_err();
        assert_eq!(error.to_string(), "No such file or directory (os error 2)");
    }
}
