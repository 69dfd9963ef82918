//! What C sees: pointers are checked and translated here, nothing is decided.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use firn_client::{ChunkList, OpenMount};
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkPiece, Place, SpillRegion};

use crate::error::{self, Error};

mod state;
mod transaction;

/// `struct firn`.
pub struct Handle(Arc<OpenMount>, RegionPaths);

/// The paths of the region, for C.
struct RegionPaths {
    arena: CString,
    spill: Option<CString>,
}

/// `struct firn_chunk_list`.
pub struct ChunkListHandle {
    list: ChunkList,
    pieces: Vec<ChunkMeta>,
}

/// `struct firn_data_region`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Region {
    size: usize,
    address: *const c_void,
    bytes: u64,
    page_bytes: u64,
    chunk_bytes: u64,
    path: *const c_char,
    offset: u64,
    spill_address: *const c_void,
    spill_bytes: u64,
    spill_path: *const c_char,
}

const _: () = assert!(size_of::<Region>() == 80);
// SAFETY: `repr(C)`, all bits are fields without padding, and the first is `size`.
unsafe impl CallerSized for Region {}

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
// SAFETY: nobody changes a list, so threads may look at it at once.
unsafe impl Sync for ChunkMeta {}

/// A structure that the program makes and the library fills. Its first field is `size_t size`, which the
/// program sets to what it was compiled with, so that later versions of the library can add fields.
///
/// # Safety
/// The type is `repr(C)`, begins with a `usize` and has no padding.
pub(crate) unsafe trait CallerSized: Copy {}

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
    error::keep_message(&failed);
    failed.errno()
}

/// # Safety
/// `pointer` is null or points to a `T` that nobody else changes while it is used.
unsafe fn given<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Error> {
    // SAFETY: null or valid and unchanged, as promised to this function.
    unsafe { pointer.as_ref() }.ok_or(Error::Argument(what))
}

/// # Safety
/// `path` is null or a string that ends with a zero byte.
unsafe fn path_of<'a>(path: *const c_char) -> Result<&'a Path, Error> {
    if path.is_null() {
        return Err(Error::Argument("the path is a null pointer"));
    }
    // SAFETY: not null, so a string that ends, as promised to this function.
    Ok(Path::new(OsStr::from_bytes(
        unsafe { CStr::from_ptr(path) }.to_bytes(),
    )))
}

/// Fills a structure of the program's as far as its `size` says. What it lacks is not written; what this version
/// of the library does not know of it is zeroed.
///
/// # Safety
/// `to` is null, or its `size` says how many bytes may be written there.
unsafe fn give_sized<T: CallerSized>(to: *mut T, value: T) -> Result<(), Error> {
    if to.is_null() {
        return Err(Error::Argument(
            "the place for the answer is a null pointer",
        ));
    }
    const HEAD: usize = size_of::<usize>();
    // SAFETY: not null, and its first word is `size` (`CallerSized`), which the program has set.
    let size = unsafe { to.cast::<usize>().read() };
    if size < HEAD {
        return Err(Error::Argument(
            "the structure's size is not set: set its `size` to its sizeof first",
        ));
    }
    let known = size.min(size_of::<T>());
    let from = (&raw const value).cast::<u8>();
    // SAFETY: `known` bytes are in both structures, and `size` may be written; the program's own `size` stays.
    unsafe {
        let to = to.cast::<u8>();
        std::ptr::copy_nonoverlapping(from.add(HEAD), to.add(HEAD), known - HEAD);
        to.add(known).write_bytes(0, size - known);
    }
    Ok(())
}

/// # Safety
/// `to` is null or may be written to.
unsafe fn give<T>(to: *mut T, value: T) -> Result<(), Error> {
    if to.is_null() {
        return Err(Error::Argument(
            "the place for the answer is a null pointer",
        ));
    }
    // SAFETY: not null, so writable, as promised to this function.
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
        // SAFETY: null or a string, by firn.h.
        let mount = OpenMount::open(unsafe { path_of(path) }?)?;
        let paths = RegionPaths::of(&mount)?;
        let opened = Box::new(Handle(Arc::new(mount), paths));
        // SAFETY: not null, so a place for a pointer by firn.h.
        unsafe { give(handle, Box::into_raw(opened)) }
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
            // SAFETY: `firn_open` made it with `Box::into_raw`, and by firn.h it is closed once.
            let handle = unsafe { Box::from_raw(handle) };
            handle.0.close();
        }
        Ok(())
    });
}

// ---- the data region -----------------------------------------------------------------------------

impl RegionPaths {
    fn of(mount: &OpenMount) -> Result<Self, Error> {
        let text = |path: &BytePath| {
            CString::new(path.as_bytes()).map_err(|_| Error::Argument("a path with a zero byte"))
        };
        let region = mount.region();
        let spill = region.spill.as_ref();
        Ok(Self {
            arena: text(&region.path)?,
            spill: spill.map(|spill| text(&spill.path)).transpose()?,
        })
    }
}

fn region(Handle(mount, paths): &Handle) -> Region {
    let mapping = mount.mapping();
    let spill = mapping.and_then(|mapping| mapping.spill.as_ref());
    let region = mount.region();
    let spill_end = |spill: &SpillRegion| spill.offset + spill.bytes;
    Region {
        size: size_of::<Region>(),
        address: mapping.map_or(std::ptr::null(), |mapping| mapping.region.start().cast()),
        bytes: region.bytes,
        page_bytes: region.page_bytes,
        chunk_bytes: region.chunk_bytes,
        path: paths.arena.as_ptr(),
        offset: region.offset,
        spill_address: spill.map_or(std::ptr::null(), |spill| spill.view.start().cast()),
        spill_bytes: region.spill.as_ref().map_or(0, spill_end),
        spill_path: paths
            .spill
            .as_ref()
            .map_or(std::ptr::null(), |path| path.as_ptr()),
    }
}

/// `firn_get_data_region`.
///
/// # Safety
/// `handle` is null or open; `to` is null or a place for a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_get_data_region(handle: *const Handle, to: *mut Region) -> c_int {
    guarded(|| {
        // SAFETY: null or open, by firn.h.
        let handle = unsafe { given(handle, NO_HANDLE) }?;
        // SAFETY: null, or of the size that it says, by firn.h.
        unsafe { give_sized(to, region(handle)) }
    })
}

/// `firn_map_region`.
///
/// # Safety
/// As for `firn_get_data_region`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_map_region(handle: *const Handle, to: *mut Region) -> c_int {
    guarded(|| {
        // SAFETY: null or open, by firn.h.
        let handle = unsafe { given(handle, NO_HANDLE) }?;
        handle.0.map_region()?;
        // SAFETY: null, or of the size that it says, by firn.h.
        unsafe { give_sized(to, region(handle)) }
    })
}

// ---- chunk lists ---------------------------------------------------------------------------------

fn meta(mount: &OpenMount, piece: &ChunkPiece) -> Result<ChunkMeta, Error> {
    let place = match piece.place {
        Place::Memory => IN_MEMORY,
        Place::Spill => IN_SPILL,
        Place::Backing => IN_BACKING,
        Place::Hole => IN_HOLE,
    };
    let address = mount.address_of(piece)?;
    Ok(ChunkMeta {
        offset: piece.offset,
        bytes: piece.bytes,
        at: piece.at,
        address: address.unwrap_or(std::ptr::null()).cast(),
        place,
        chunk: piece.chunk.unwrap_or(NO_CHUNK),
        reserved: [0; 2],
    })
}

fn piece_of(meta: &ChunkMeta) -> Result<ChunkPiece, Error> {
    let place = match meta.place {
        IN_MEMORY => Place::Memory,
        IN_SPILL => Place::Spill,
        IN_BACKING => Place::Backing,
        IN_HOLE => Place::Hole,
        _ => return Err(Error::Argument("the piece is none of this mount")),
    };
    Ok(ChunkPiece {
        offset: meta.offset,
        bytes: meta.bytes,
        place,
        at: meta.at,
        chunk: (meta.chunk != NO_CHUNK).then_some(meta.chunk),
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
        // SAFETY: null or open, by firn.h.
        let mount = &unsafe { given(handle, NO_HANDLE) }?.0;
        // SAFETY: null or a string, by firn.h.
        let list = ChunkList::make(mount, unsafe { path_of(path) }?)?;
        let pieces = list
            .pieces
            .iter()
            .map(|piece| meta(mount, piece))
            .collect::<Result<_, _>>()?;
        let made = Box::new(ChunkListHandle { list, pieces });
        // SAFETY: not null, so a place for a pointer by firn.h.
        unsafe { give(to, Box::into_raw(made)) }
    })
}

/// `firn_chunk_list_bytes`.
///
/// # Safety
/// `list` is null or was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_bytes(list: *const ChunkListHandle) -> u64 {
    // SAFETY: null or not freed, by firn.h.
    unsafe { list.as_ref() }.map_or(0, |list| list.list.bytes)
}

/// `firn_chunk_list_count`.
///
/// # Safety
/// `list` is null or was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_count(list: *const ChunkListHandle) -> usize {
    // SAFETY: null or not freed, by firn.h.
    unsafe { list.as_ref() }.map_or(0, |list| list.pieces.len())
}

/// `firn_chunk_list_pieces`.
///
/// # Safety
/// `list` is null or was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_chunk_list_pieces(list: *const ChunkListHandle) -> *const ChunkMeta {
    // SAFETY: null or not freed, by firn.h.
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
        // SAFETY: null or not freed, by firn.h.
        let list = &unsafe { given(list, NO_LIST) }?.list;
        let found = list.was_changed()?;
        if changed.is_null() {
            return Ok(());
        }
        // SAFETY: not null, so a place for an int by firn.h.
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
            // SAFETY: `firn_get_chunk_meta_list` made it with `Box::into_raw`, and by firn.h it is freed once.
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
        // SAFETY: null or open, by firn.h.
        let mount = &unsafe { given(handle, NO_HANDLE) }?.0;
        // SAFETY: null, or of a list that is not freed, by firn.h.
        let piece = unsafe { given(piece, "the piece is a null pointer") }?;
        let end = from.checked_add(bytes as u64);
        if end.is_none_or(|end| end > piece.bytes) {
            return Err(Error::Argument("the range is not within the piece"));
        }
        if bytes == 0 {
            return Ok(());
        }
        if buffer.is_null() {
            return Err(Error::Argument("the buffer is a null pointer"));
        }
        let piece = piece_of(piece)?;
        // SAFETY: the buffer is writable for so many bytes and the program's own, by firn.h.
        unsafe { mount.read_piece(&piece, from, buffer.cast(), bytes) }?;
        Ok(())
    })
}
