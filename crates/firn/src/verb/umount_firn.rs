//! `umount.fuse.firn DIR [-flnrv]`: the helper that umount(8) calls for a mount of Firn.
//!
//! It asks firnd, the daemon of the mount, to drain (write all data in memory to the backing) and to unmount.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use firn_client::Connection;
use rustix::mount::UnmountFlags;

use super::umount::{UmountArgs, umount};
use crate::cli::report_result;
use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};

/// Unmounts a mount of Firn. Returns an exit status of umount(8): 0 done, 1 incorrect invocation, 32 failure.
pub fn main(args: &[OsString]) -> u8 {
    match report_result(parse_call(args).and_then(run)) {
        // The mount is gone. A message about data that remains in the arena was printed.
        DONE | PARTLY => 0,
        USAGE => 1,
        _ => 32,
    }
}

/// The call of umount(8).
#[derive(Debug, Default, PartialEq)]
struct UmountCall {
    /// The mount point.
    dir: PathBuf,
    /// Whether the unmount is forced.
    is_forced: bool,
    /// Whether the unmount is lazy: the mount point is detached now, and firnd ends when the last file is closed.
    is_lazy: bool,
}

/// Reads the arguments of umount(8). Fails if a flag is unknown, or the mount point is missing.
fn parse_call(args: &[OsString]) -> Result<UmountCall, Failure> {
    let usage_failure = |problem: &str| {
        Failure::new(
            USAGE,
            format!("{problem}; usage: umount.fuse.firn DIR [-flnrv]"),
        )
    };
    let mut call = UmountCall::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let Some(flags) = arg.to_str().and_then(|text| text.strip_prefix('-')) else {
            call.dir = arg.into();
            continue;
        };
        for (offset, flag) in flags.char_indices() {
            match flag {
                'f' => call.is_forced = true,
                'l' => call.is_lazy = true,
                // These flags change nothing here.
                'n' | 'r' | 'v' | 's' => {}
                // Both values are known: only Firn's mounts get here, and umount(8) has entered the namespace already.
                't' | 'N' => {
                    // The value is attached to the flag, or is the next argument.
                    let has_attached_value = offset + 1 < flags.len();
                    if !has_attached_value {
                        args.next();
                    }
                    break;
                }
                _ => return Err(usage_failure(&format!("unknown flag -{flag}"))),
            }
        }
    }
    if call.dir.as_os_str().is_empty() {
        return Err(usage_failure("expected DIR"));
    }
    Ok(call)
}

/// Unmounts. The kernel does so for a lazy unmount, and if firnd (the daemon of the mount) does not answer. Otherwise
/// firnd first writes all data in memory to the backing.
fn run(call: UmountCall) -> Result<u8, Failure> {
    if call.is_lazy {
        // The mount point is detached at once. firnd drains and ends when the last file is closed.
        return unmount_by_kernel(&call.dir, UnmountFlags::DETACH);
    }
    // If firnd does not answer, the helper leaves the unmount to the kernel, which checks the user's permission.
    if !does_firnd_answer(&call.dir) {
        let flags = if call.is_forced {
            UnmountFlags::FORCE
        } else {
            UnmountFlags::empty()
        };
        return unmount_by_kernel(&call.dir, flags);
    }
    umount(&UmountArgs {
        path: call.dir,
        force: call.is_forced,
        keep_held: false,
        discard: false,
        yes: false,
        quiet: false,
    })
}

/// Returns whether a directory is a mount point of Firn whose firnd accepts a connection.
fn does_firnd_answer(dir: &Path) -> bool {
    match firn_client::find(dir) {
        Ok(location) => {
            let is_mount_point = location.relative.is_empty();
            is_mount_point && Connection::open(&location.mount).is_ok()
        }
        Err(_) => false,
    }
}

/// Unmounts without firnd, by umount(2).
fn unmount_by_kernel(dir: &Path, flags: UnmountFlags) -> Result<u8, Failure> {
    rustix::mount::unmount(dir, flags).map_err(|errno| {
        Failure::new(
            FAILED,
            format!("cannot unmount {}: {errno}", crate::text::path(dir)),
        )
    })?;
    Ok(DONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(words: &[&str]) -> Option<UmountCall> {
        parse_call(&words.iter().map(OsString::from).collect::<Vec<_>>()).ok()
    }

    #[test]
    fn the_words_of_umount_8_are_understood() {
        let dir = PathBuf::from("/m");
        assert_eq!(
            call(&["/m"]),
            Some(UmountCall {
                dir: dir.clone(),
                ..UmountCall::default()
            })
        );
        let all = UmountCall {
            dir,
            is_forced: true,
            is_lazy: true,
        };
        assert_eq!(
            call(&["/m", "-fln", "-t", "fuse.firn", "-N", "1"]),
            Some(all)
        );
        assert_eq!(call(&["/m", "-x"]), None);
        assert_eq!(call(&["-f"]), None);
    }
}
