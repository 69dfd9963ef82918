//! Transactions, as C asks for them.

use std::ffi::{c_char, c_int, c_uint};
use std::path::Path;

use firn_protocol::path::BytePath;
use firn_protocol::{Owner, Request};

use super::{Handle, NO_HANDLE, give, given, guarded, path_of};
use crate::error::Error;

/// `FIRN_NEXT_ID`.
const NEXT_ID: u64 = u64::MAX;
/// `FIRN_BEGIN_NEXT`.
const BEGIN_NEXT: c_uint = 1;
/// `FIRN_COMMIT_ASYNC`.
const ASYNC: c_uint = 2;

/// Sends the request that `make` makes of the path below the mount.
///
/// # Safety
/// `handle` is null or open; `path` is null or a string.
unsafe fn ask(
    handle: *const Handle,
    path: *const c_char,
    make: impl FnOnce(BytePath) -> Request,
) -> Result<Option<u64>, Error> {
    // SAFETY: null or open, as promised to this function.
    let mount = &unsafe { given(handle, NO_HANDLE) }?.0;
    // SAFETY: null or a string, as promised to this function.
    let path: &Path = unsafe { path_of(path) }?;
    Ok(mount.request_transaction(path, make)?)
}

/// Only a commit can take the next number: elsewhere it would be one that nobody chose.
fn chosen(id: u64) -> Result<u64, Error> {
    match id {
        NEXT_ID => Err(Error::Argument(
            "FIRN_NEXT_ID is for firn_commit() only: give a number",
        )),
        id => Ok(id),
    }
}

/// `firn_begin`.
///
/// # Safety
/// `handle` is null or open; `path` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_begin(handle: *const Handle, path: *const c_char) -> c_int {
    let begin = |path| Request::Begin {
        path,
        owner: Owner::Connection,
    };
    // SAFETY: handle and path are what firn.h asks of the program.
    guarded(|| unsafe { ask(handle, path, begin) }.map(drop))
}

/// `firn_prepare`.
///
/// # Safety
/// As for `firn_begin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_prepare(
    handle: *const Handle,
    path: *const c_char,
    id: u64,
) -> c_int {
    guarded(|| {
        let id = chosen(id)?;
        // SAFETY: handle and path are what firn.h asks of the program.
        unsafe { ask(handle, path, |path| Request::Prepare { path, id }) }.map(drop)
    })
}

/// `firn_commit`.
///
/// # Safety
/// As for `firn_begin`; `committed` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_commit(
    handle: *const Handle,
    path: *const c_char,
    id: u64,
    flags: c_uint,
    committed: *mut u64,
) -> c_int {
    guarded(|| {
        if flags & !(BEGIN_NEXT | ASYNC) != 0 {
            return Err(Error::Argument("a flag that this library does not know"));
        }
        let id = (id != NEXT_ID).then_some(id);
        let begin = flags & BEGIN_NEXT != 0;
        let behind = flags & ASYNC != 0;
        // SAFETY: handle and path are what firn.h asks of the program.
        let found = unsafe {
            ask(handle, path, |path| Request::Commit {
                path,
                id,
                begin,
                behind,
            })
        }?;
        if committed.is_null() {
            return Ok(());
        }
        // SAFETY: not null, so a place for a number by firn.h.
        unsafe { give(committed, found.unwrap_or_default()) }
    })
}

/// `firn_abort`.
///
/// # Safety
/// As for `firn_begin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_abort(handle: *const Handle, path: *const c_char) -> c_int {
    // SAFETY: handle and path are what firn.h asks of the program.
    guarded(|| unsafe { ask(handle, path, |path| Request::Abort { path }) }.map(drop))
}

/// `firn_restore`.
///
/// # Safety
/// As for `firn_begin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_restore(
    handle: *const Handle,
    path: *const c_char,
    id: u64,
) -> c_int {
    guarded(|| {
        let id = chosen(id)?;
        // SAFETY: handle and path are what firn.h asks of the program.
        unsafe { ask(handle, path, |path| Request::Restore { path, id }) }.map(drop)
    })
}
