//! `/proc/self/mountinfo`, as far as Firn needs it (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// What the kernel calls a Firn mount.
const FIRN: &str = "fuse.firn";

/// One mounted Firn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FirnMount {
    /// Where.
    pub(crate) mount_point: PathBuf,
    /// Its backing.
    pub(crate) backing: PathBuf,
}

/// All Firn mounts that this process can see, later ones over earlier ones.
pub(crate) fn firn_mounts() -> Vec<FirnMount> {
    parse(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

/// The one at `mount_point`, if that is what is on top there.
pub(crate) fn at(mount_point: &Path) -> Option<FirnMount> {
    firn_mounts().into_iter().rev().find(|mount| mount.mount_point == mount_point)
}

fn parse(text: &[u8]) -> Vec<FirnMount> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<FirnMount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let separator = fields.iter().position(|field| *field == b"-")?;
    let (kind, source) = (fields.get(separator + 1)?, fields.get(separator + 2)?);
    (*kind == FIRN.as_bytes())
        .then(|| Some(FirnMount { mount_point: unescape(fields.get(4)?), backing: unescape(source) }))?
}

/// Blanks and backslashes are written as `\ooo`.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal =
            tail.get(..3).filter(|_| byte == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(value) => {
                out.push(value);
                rest = &tail[3..];
            }
            None => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out).into()
}

/// For messages.
pub(crate) fn shown(path: &Path) -> String {
    String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_firn_mounts_are_found_and_their_paths_are_unescaped() {
        let text = b"25 30 0:23 / /proc rw - proc proc rw\n\
            98 30 0:51 / /mnt/a\\040b rw,nosuid shared:1 - fuse.firn /scratch/r\\134x rw,user_id=0\n";
        let expected = FirnMount { mount_point: "/mnt/a b".into(), backing: "/scratch/r\\x".into() };
        assert_eq!(parse(text), [expected]);
    }

    #[test]
    fn broken_lines_are_skipped() {
        assert_eq!(parse(b"\n1 2 - fuse.firn\n- fuse.firn x\n\\"), []);
    }
}
