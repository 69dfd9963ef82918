//! Parser of `/proc/self/mountinfo` (proc_pid_mountinfo(5)), in which the kernel lists the mounts that a process sees.
//!
//! The list has one line for each mount. A later mount at the same directory covers an earlier one. Paths are bytes, in
//! which blanks and some other characters are escaped.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// One mount, of any file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Id of the mount. No two mounts of a host have the same id at the same time, in any namespace.
    pub id: u64,
    /// Major and minor device number of the file system, as stat(2) returns them for its files.
    pub device: (u32, u32),
    /// The directory of the file system that is mounted; `/` unless it is a bind mount.
    pub root: PathBuf,
    /// The directory at which it is mounted.
    pub mount_point: PathBuf,
    /// Type of the file system, such as `fuse.firn`.
    pub fs_type: String,
    /// The mounted device, export or directory.
    pub source: PathBuf,
    /// Id of the user that mounted it, for a FUSE mount.
    pub user_id: Option<u32>,
    /// Options of the file system, separated by commas, such as `rw,vers=4.2,local_lock=none`.
    pub options: String,
}

/// Number of fields before the optional ones.
const FIXED_FIELDS: usize = 6;
/// Number of octal digits of an escaped character.
const OCTAL_DIGITS: usize = 3;

/// Type of Firn's mounts.
pub const FIRN: &str = "fuse.firn";

/// Parses all mounts that this process sees. A line of unknown form is left out.
pub fn parse(text: &[u8]) -> Vec<Entry> {
    text.split(|byte| *byte == b'\n')
        .filter_map(parse_line)
        .collect()
}

/// Parses one line. Returns `None` if a field is missing or has an unknown form. proc_pid_mountinfo(5) numbers the
/// fields.
fn parse_line(line: &[u8]) -> Option<Entry> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    // The optional fields end with a field that is a hyphen.
    let optional_fields = fields.get(FIXED_FIELDS..)?;
    let hyphen_index = optional_fields.iter().position(|field| *field == b"-")?;
    let [fs_type, source, options, ..] = &optional_fields[hyphen_index + 1..] else {
        return None;
    };
    let options = String::from_utf8_lossy(options).into_owned();
    let user_id = options
        .split(',')
        .find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    let (major, minor) = std::str::from_utf8(fields.get(2)?).ok()?.split_once(':')?;
    Some(Entry {
        id: std::str::from_utf8(fields.first()?).ok()?.parse().ok()?,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: unescape(fields.get(3)?),
        mount_point: unescape(fields.get(4)?),
        fs_type: String::from_utf8_lossy(fs_type).into_owned(),
        source: unescape(source),
        user_id,
        options,
    })
}

/// Decodes a path, in which blank, tab, newline and backslash are a backslash and three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut remaining = field;
    while let [first, tail @ ..] = remaining {
        if *first == b'\\'
            && let Some((digits, after_digits)) = tail.split_at_checked(OCTAL_DIGITS)
            && let Some(byte) = parse_octal(digits)
        {
            bytes.push(byte);
            remaining = after_digits;
        } else {
            bytes.push(*first);
            remaining = tail;
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Parses octal digits. Returns `None` if they are no number of a byte.
fn parse_octal(digits: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(digits).ok()?;
    u8::from_str_radix(digits, 8).ok()
}

/// Returns the mount on which `path` lies. `path` must be absolute and contain no symbolic links.
pub fn holding<'a>(entries: &'a [Entry], path: &Path) -> Option<&'a Entry> {
    // If several mounts have the longest path, max_by_key returns the last one, which covers the others.
    entries
        .iter()
        .filter(|entry| path.starts_with(&entry.mount_point))
        .max_by_key(|entry| entry.mount_point.as_os_str().as_bytes().len())
}

/// Returns the mount at `mount_point` that covers all others there.
pub fn on_top<'a>(entries: &'a [Entry], mount_point: &Path) -> Option<&'a Entry> {
    entries
        .iter()
        .rev()
        .find(|entry| entry.mount_point == mount_point)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
        40 22 0:50 / /ckpt\\040x rw,nosuid,nodev shared:7 master:2 - fuse.firn /scratch/a\\134b rw,user_id=7,group_id=7\n\
        41 22 0:50 /sub /bound rw - fuse.firn /scratch/a rw,user_id=0,group_id=0\n\
        42 40 0:51 / /ckpt\\040x/inner rw - tmpfs tmpfs rw\n\
        nonsense\n";

    #[test]
    fn escaped_names_optional_fields_and_owners_are_read() {
        let entries = parse(TEXT);
        assert_eq!(entries.len(), 4);
        assert_eq!(entries[1].mount_point, Path::new("/ckpt x"));
        assert_eq!(entries[1].source, Path::new("/scratch/a\\b"));
        assert_eq!(
            (entries[1].fs_type.as_str(), entries[1].user_id),
            ("fuse.firn", Some(7))
        );
        assert_eq!(entries[2].root, Path::new("/sub"));
        assert_eq!(entries[3].user_id, None);
        assert_eq!(entries[2].device, (0, 50));
    }

    #[test]
    fn regression_a_mount_point_that_the_kernel_escapes_is_found() {
        let table = b"40 22 0:50 / /ckpt rw - fuse.firn /a rw\n\
            41 22 0:51 / /\xff\\012x\\040\\134 rw - fuse.firn /caf\xe9 rw\n\
            42 22 0:52 / /ckpt rw - fuse.firn /b rw\n";
        let entries = parse(table);
        let find = |path: &[u8]| {
            let path = Path::new(std::ffi::OsStr::from_bytes(path));
            on_top(&entries, path).map(|entry| entry.device.1)
        };
        assert_eq!(find(b"/ckpt"), Some(52));
        assert_eq!(find(b"/\xff\nx \\"), Some(51));
        assert_eq!(find(b"/\xfe\nx \\"), None);
    }

    #[test]
    fn broken_lines_are_skipped() {
        assert_eq!(parse(b"\n1 2 - fuse.firn\n- fuse.firn x\n\\"), []);
    }

    #[test]
    fn the_deepest_mount_holds_a_path() {
        let entries = parse(TEXT);
        let kind = |path: &str| holding(&entries, Path::new(path)).unwrap().fs_type.clone();
        assert_eq!(kind("/ckpt x/a/b"), "fuse.firn");
        assert_eq!(kind("/ckpt x/inner/a"), "tmpfs");
        assert_eq!(kind("/ckpt xy"), "ext4");
    }
}
