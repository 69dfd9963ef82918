//! `umount.fuse.firn DIR [-flnrv]`: the helper that umount(8) calls for a mount of Firn.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use firn_client::Connection;
use rustix::mount::UnmountFlags;

use super::umount::{UmountArgs, umount};
use crate::cli::report_result;
use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};

/// Unmounts a mount of Firn. Returns an exit status of umount(8): 0 done, 1 incorrect invocation, 32 failure.
pub fn main(args: &[OsString]) -> u8 {
    match report_result(parse(args).and_then(run)) {
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
    force: bool,
    /// Whether the unmount is lazy: the mount point is detached now, and firnd ends when the last file is closed.
    lazy: bool,
}

/// Reads the arguments of umount(8). Fails if a flag is unknown, or the mount point is missing.
fn parse(args: &[OsString]) -> Result<UmountCall, Failure> {
    let usage = |what: &str| {
        Failure::new(
            USAGE,
            format!("{what}; usage: umount.fuse.firn DIR [-flnrv]"),
        )
    };
    let mut call = UmountCall::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let Some(flags) = arg.to_str().and_then(|text| text.strip_prefix('-')) else {
            call.dir = arg.into();
            continue;
        };
        for (at, flag) in flags.char_indices() {
            match flag {
                'f' => call.force = true,
                'l' => call.lazy = true,
                'n' | 'r' | 'v' | 's' => {}
                // Both values are known: only Firn's mounts get here, and umount(8) has entered the namespace already.
                't' | 'N' => {
                    if at + 1 == flags.len() {
                        args.next();
                    }
                    break;
                }
                _ => return Err(usage(&format!("unknown flag -{flag}"))),
            }
        }
    }
    if call.dir.as_os_str().is_empty() {
        Err(usage("expected DIR"))
    } else {
        Ok(call)
    }
}

/// Unmounts. The kernel does so for a lazy unmount, and if firnd does not answer. Otherwise firnd drains first.
fn run(call: UmountCall) -> Result<u8, Failure> {
    if call.lazy {
        // The mount point is detached at once. firnd drains and ends when the last file is closed.
        return unmount_by_kernel(&call.dir, UnmountFlags::DETACH);
    }
    // If firnd does not answer, the helper leaves the unmount to the kernel, which checks the user's permission.
    let place = firn_client::find(&call.dir)
        .ok()
        .filter(|place| place.relative.is_empty());
    if place.is_none_or(|place| Connection::open(&place.mount).is_err()) {
        let flags = if call.force {
            UnmountFlags::FORCE
        } else {
            UnmountFlags::empty()
        };
        return unmount_by_kernel(&call.dir, flags);
    }
    umount(&UmountArgs {
        path: call.dir,
        force: call.force,
        keep_held: false,
        discard: false,
        yes: false,
        quiet: false,
    })
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
        parse(&words.iter().map(OsString::from).collect::<Vec<_>>()).ok()
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
            force: true,
            lazy: true,
        };
        assert_eq!(
            call(&["/m", "-fln", "-t", "fuse.firn", "-N", "1"]),
            Some(all)
        );
        assert_eq!(call(&["/m", "-x"]), None);
        assert_eq!(call(&["-f"]), None);
    }
}
