//! What C sees: pointers are checked and translated here, nothing is decided.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use firn_protocol::{ChunkPiece, Place};

use crate::error::{self, Error};
use crate::mount::{List, Mount};

mod transaction;

/// `struct firn`.
pub struct Handle(Arc<Mount>);

/// `struct firn_chunk_list`.
pub struct ChunkListHandle {
    list: List,
    pieces: Vec<ChunkMeta>,
}

/// `struct firn_data_region`.
#[repr(C)]
pub struct Region {
    address: *const c_void,
    bytes: u64,
    page_bytes: u64,
    chunk_bytes: u64,
    path: *const c_char,
    offset: u64,
    spill_address: *const c_void,
    spill_bytes: u64,
    spill_path: *const c_char,
    reserved: [u64; 7],
}

const _: () = assert!(size_of::<Region>() == 128);

/// `struct firn_chunk_meta`.
#[derive(Debug)]
#[repr(C)]
pub struct ChunkMeta {
    offset: u64,
    bytes: u64,
    at: u64,
    address: *const c_void,
    place: u32,
    chunk: u32,
    reserved: [u64; 2],
}

const _: () = assert!(size_of::<ChunkMeta>() == 56);

// SAFETY: the address is of shared memory, which is only read; the list does not follow it.
unsafe impl Send for ChunkMeta {}
// SAFETY: as above.
unsafe impl Sync for ChunkMeta {}

const IN_MEMORY: u32 = 0;
const IN_SPILL: u32 = 1;
const IN_BACKING: u32 = 2;
const IN_HOLE: u32 = 3;
const NO_CHUNK: u32 = u32::MAX;

/// Does `work`; keeps the words of its error. Nothing unwinds out of here.
fn guarded(work: impl FnOnce() -> Result<(), Error>) -> c_int {
    let failed = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            Error::Fault(text.unwrap_or("a panic").to_owned())
        }
    };
    error::tell(&failed);
    failed.errno()
}

/// # Safety
/// `pointer` is null or points to a `T` that nobody else changes while it is used.
unsafe fn given<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Error> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or(Error::Argument(what))
}

/// # Safety
/// `path` is null or a string that ends with a zero byte.
unsafe fn path_of<'a>(path: *const c_char) -> Result<&'a Path, Error> {
    if path.is_null() {
        return Err(Error::Argument("the path is a null pointer"));
    }
    // SAFETY: the caller's promise.
    Ok(Path::new(OsStr::from_bytes(
        unsafe { CStr::from_ptr(path) }.to_bytes(),
    )))
}

/// # Safety
/// `to` is null or may be written to.
unsafe fn give<T>(to: *mut T, value: T) -> Result<(), Error> {
    if to.is_null() {
        return Err(Error::Argument(
            "the place for the answer is a null pointer",
        ));
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

const NO_HANDLE: &str = "the handle is a null pointer";
const NO_LIST: &str = "the list is a null pointer";

// ---- the library ---------------------------------------------------------------------------------

/// `firn_version`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// `firn_strerror`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_strerror(error: c_int) -> *const c_char {
    error::meaning(error).as_ptr()
}

/// `firn_error_message`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_error_message() -> *const c_char {
    error::last()
}

// ---- a mount -------------------------------------------------------------------------------------

/// `firn_open`.
///
/// # Safety
/// As in C: `path` is null or a string, `handle` null or a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_open(path: *const c_char, handle: *mut *mut Handle) -> c_int {
    guarded(|| {
        if handle.is_null() {
            return Err(Error::Argument(
                "the place for the handle is a null pointer",
            ));
        }
        // SAFETY: the caller's promise.
        let mount = Mount::open(unsafe { path_of(path) }?)?;
        // SAFETY: the caller's promise.
        unsafe { give(handle, Box::into_raw(Box::new(Handle(Arc::new(mount))))) }
    })
}

/// `firn_close`.
///
/// # Safety
/// `handle` is null, or came from `firn_open` and was not closed; nobody uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_close(handle: *mut Handle) {
    guarded(|| {
        if !handle.is_null() {
            // SAFETY: the caller's promise.
            let handle = unsafe { Box::from_raw(handle) };
            handle.0.close();
        }
        Ok(())
    });
}

// ---- the data region -----------------------------------------------------------------------------

fn region(mount: &Mount) -> Region {
    let mapping = mount.mapping();
    let spill = mapping.and_then(|mapping| mapping.spill.as_ref());
    let region = &mount.region;
    Region {
        address: mapping.map_or(std::ptr::null(), |mapping| mapping.region.start().cast()),
        bytes: region.bytes,
        page_bytes: region.page_bytes,
        chunk_bytes: region.chunk_bytes,
        path: mount.path.as_ptr(),
        offset: region.offset,
        spill_address: spill.map_or(std::ptr::null(), |spill| spill.view.start().cast()),
        spill_bytes: region
            .spill
            .as_ref()
            .map_or(0, |spill| spill.offset + spill.bytes),
        spill_path: mount
            .spill_path
            .as_ref()
            .map_or(std::ptr::null(), |path| path.as_ptr()),
        reserved: [0; 7],
    }
}

/// `firn_get_data_region`.
///
/// # Safety
/// `handle` is null or open; `to` is null or a place for a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_get_data_region(handle: *const Handle, to: *mut Region) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let mount = &unsafe { given(handle, NO_HANDLE) }?.0;
        // SAFETY: the caller's promise.
        unsafe { give(to, region(mount)) }
    })
}

/// `firn_map_region`.
///
/// # Safety
/// As for `firn_get_data_region`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_map_region(handle: *const Handle, to: *mut Region) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let mount = &unsafe { given(handle, NO_HANDLE) }?.0;
        mount.map()?;
        // SAFETY: the caller's promise.
        unsafe { give(to, region(mount)) }
    })
}

// ---- chunk lists ---------------------------------------------------------------------------------

fn meta(mount: &Mount, piece: &ChunkPiece) -> Result<ChunkMeta, Error> {
    let &ChunkPiece {
        offset,
        bytes,
        place,
        at,
        chunk,
    } = piece;
    let view = |mapped: Option<&crate::region::View>| match mapped {
        None => Ok(std::ptr::null()),
        Some(view) => view.address(at, bytes).ok_or_else(|| {
            let path = mount.region.path.clone();
            let why = format!("{piece:?} is outside of it");
            Error::Foreign { path, why }
        }),
    };
    let mapping = mount.mapping();
    let spill = mapping.and_then(|mapping| mapping.spill.as_ref());
    let (place, address) = match place {
        Place::Memory => (IN_MEMORY, view(mapping.map(|mapping| &mapping.region))?),
        Place::Spill => (IN_SPILL, view(spill.map(|spill| &spill.view))?),
        Place::Backing => (IN_BACKING, std::ptr::null()),
        Place::Hole => (IN_HOLE, std::ptr::null()),
    };
    let address = address.cast();
    let chunk = chunk.unwrap_or(NO_CHUNK);
    Ok(ChunkMeta {
        offset,
        bytes,
        at,
        address,
        place,
        chunk,
        reserved: [0; 2],
    })
}

/// `firn_get_chunk_meta_list`.
///
/// # Safety
/// `handle` is null or open; `path` is null or a string; `to` is null or a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_get_chunk_meta_list(
    handle: *const Handle,
    path: *const c_char,
    to: *mut *mut ChunkListHandle,
) -> c_int {
    guarded(|| {
        if to.is_null() {
            return Err(Error::Argument("the place for the list is a null pointer"));
        }
        // SAFETY: the caller's promise.
        let mount = &unsafe { given(handle, NO_HANDLE) }?.0;
        // SAFETY: the caller's promise.
        let made = mount.list(unsafe { path_of(path) }?)?;
        // From here on its drop lets go.
        let list = List {
            mount: Arc::clone(mount),
            number: made.list,
            bytes: made.bytes,
        };
        let pieces = made
            .pieces
            .iter()
            .map(|piece| meta(mount, piece))
            .collect::<Result<_, _>>()?;
        // SAFETY: the caller's promise.
        unsafe {
            give(
                to,
                Box::into_raw(Box::new(ChunkListHandle { list, pieces })),
            )
        }
    })
}

/// `firn_chunk_list_bytes`.
///
/// # Safety
/// `list` is null or was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_bytes(list: *const ChunkListHandle) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { list.as_ref() }.map_or(0, |list| list.list.bytes)
}

/// `firn_chunk_list_count`.
///
/// # Safety
/// `list` is null or was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_count(list: *const ChunkListHandle) -> usize {
    // SAFETY: the caller's promise.
    unsafe { list.as_ref() }.map_or(0, |list| list.pieces.len())
}

/// `firn_chunk_list_pieces`.
///
/// # Safety
/// `list` is null or was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_pieces(list: *const ChunkListHandle) -> *const ChunkMeta {
    // SAFETY: the caller's promise.
    unsafe { list.as_ref() }.map_or(std::ptr::null(), |list| list.pieces.as_ptr())
}

/// `firn_chunk_list_check`.
///
/// # Safety
/// `list` is null or was not freed; `changed` is null or a place for an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_check(
    list: *const ChunkListHandle,
    changed: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let list = &unsafe { given(list, NO_LIST) }?.list;
        let found = list.mount.check(list.number)?;
        if changed.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { give(changed, c_int::from(found)) }
    })
}

/// `firn_chunk_list_free`.
///
/// # Safety
/// `list` is null, or came from `firn_get_chunk_meta_list` and was not freed; nobody uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_free(list: *mut ChunkListHandle) {
    guarded(|| {
        if !list.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(list) });
        }
        Ok(())
    });
}

/// `firn_read_chunk`.
///
/// # Safety
/// `handle` is null or open; `piece` is null or of a list of this handle that is held; `buffer` is writable
/// for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_read_chunk(
    handle: *const Handle,
    piece: *const ChunkMeta,
    from: u64,
    buffer: *mut c_void,
    bytes: usize,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let mount = &unsafe { given(handle, NO_HANDLE) }?.0;
        // SAFETY: the caller's promise.
        let piece = unsafe { given(piece, "the piece is a null pointer") }?;
        if from
            .checked_add(bytes as u64)
            .is_none_or(|end| end > piece.bytes)
        {
            return Err(Error::Argument("the range is not within the piece"));
        }
        if bytes == 0 {
            return Ok(());
        }
        if buffer.is_null() {
            return Err(Error::Argument("the buffer is a null pointer"));
        }
        let (to, outside) = (
            buffer.cast::<u8>(),
            Error::Argument("the piece is none of this mount"),
        );
        let at = piece.at.saturating_add(from);
        let mapping = || {
            mount
                .mapping()
                .ok_or(Error::Argument("firn_map_region() comes first"))
        };
        match piece.place {
            IN_MEMORY => {
                let address = mapping()?.region.address(at, bytes as u64).ok_or(outside)?;
                // SAFETY: `address` is mapped for so many bytes, `to` writable for as many; the buffer is
                // the caller's own.
                unsafe { std::ptr::copy_nonoverlapping(address, to, bytes) };
                Ok(())
            }
            IN_SPILL => {
                let spill = mapping()?.spill.as_ref().ok_or(outside)?;
                // SAFETY: the caller's promise.
                unsafe { spill.read(at, to, bytes) }
            }
            IN_BACKING => Err(Error::InBacking),
            IN_HOLE => {
                // SAFETY: the caller's promise.
                unsafe { to.write_bytes(0, bytes) };
                Ok(())
            }
            _ => Err(outside),
        }
    })
}
