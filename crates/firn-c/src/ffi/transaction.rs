//! The functions of the C interface for transactions: groups of changes to one directory that a program commits or
//! aborts together.

use std::ffi::{c_int, c_uint};

use firn_protocol::path::BytePath;
use firn_protocol::{Owner, Request};

use super::{CPath, Handle, OutPlace, guarded, mount_of};
use crate::error::Error;

/// `FIRN_NEXT_ID`.
const NEXT_ID: u64 = u64::MAX;
/// `FIRN_BEGIN_NEXT`.
const BEGIN_NEXT: c_uint = 1;
/// `FIRN_COMMIT_ASYNC`.
const ASYNC: c_uint = 2;

/// Sends a request about a transaction, which `make_request` builds from the path below the mount point. Returns the
/// number of the commit if the request committed.
fn request(
    handle: Option<&Handle>,
    path: CPath<'_>,
    make_request: impl FnOnce(BytePath) -> Request,
) -> Result<Option<u64>, Error> {
    let mount = mount_of(handle)?;
    Ok(mount.request_transaction(path.path()?, make_request)?)
}

/// Returns the id. Fails for `FIRN_NEXT_ID`, because only a commit may choose the next number.
fn check_id(id: u64) -> Result<u64, Error> {
    if id == NEXT_ID {
        return Err(Error::Argument(
            "FIRN_NEXT_ID is for firn_commit() only: pass a number",
        ));
    }
    Ok(id)
}

/// `firn_begin`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_begin(handle: Option<&Handle>, path: CPath<'_>) -> c_int {
    let begin = |path| Request::Begin {
        path,
        owner: Owner::Connection,
        create: None,
    };
    guarded(|| request(handle, path, begin).map(drop))
}

/// `firn_begin_create`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_begin_create(
    handle: Option<&Handle>,
    path: CPath<'_>,
    mode: c_uint,
) -> c_int {
    let begin = |path| Request::Begin {
        path,
        owner: Owner::Connection,
        create: Some(firn_client::without_umask(mode)),
    };
    guarded(|| request(handle, path, begin).map(drop))
}

/// `firn_prepare`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_prepare(handle: Option<&Handle>, path: CPath<'_>, id: u64) -> c_int {
    guarded(|| {
        let id = check_id(id)?;
        request(handle, path, |path| Request::Prepare { path, id }).map(drop)
    })
}

/// `firn_commit`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_commit(
    handle: Option<&Handle>,
    path: CPath<'_>,
    id: u64,
    flags: c_uint,
    committed: OutPlace<'_, u64>,
) -> c_int {
    guarded(|| {
        if flags & !(BEGIN_NEXT | ASYNC) != 0 {
            return Err(Error::Argument(
                "this library does not know one of the flags",
            ));
        }
        let commit_number = request(handle, path, |path| Request::Commit {
            path,
            id: (id != NEXT_ID).then_some(id),
            begin: flags & BEGIN_NEXT != 0,
            apply_later: flags & ASYNC != 0,
        })?;
        if let Some(committed) = committed {
            committed.write(commit_number.unwrap_or_default());
        }
        Ok(())
    })
}

/// `firn_abort`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_abort(handle: Option<&Handle>, path: CPath<'_>) -> c_int {
    guarded(|| request(handle, path, |path| Request::Abort { path }).map(drop))
}

/// `firn_restore`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_restore(handle: Option<&Handle>, path: CPath<'_>, id: u64) -> c_int {
    guarded(|| {
        let id = check_id(id)?;
        request(handle, path, |path| Request::Restore { path, id }).map(drop)
    })
}
