//! The functions and types that C uses. They only check and translate pointers.
//!
//! The types of the arguments are pointers in C and express what firn.h requires of the program. `Option<&T>` is a
//! reference that may be null. `Option<Box<T>>` is a box that the program gives back. [`CPath`] is a string.
//! [`CallerPlace`] is a structure whose size the program sets. Only C creates values of these types, under the rules
//! of firn.h, so the code below can rely on them and is mostly safe code.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use firn_client::{ChunkList, OpenMount};
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkPiece, Place, SpillRegion};

use crate::error::{self, Error};

mod checkpoints;
mod state;
mod transaction;

/// `struct firn`.
pub struct Handle(Arc<OpenMount>, RegionPaths);

/// The paths of the region's files, as C strings.
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

// SAFETY: the address points to shared memory that is only read. This library does not dereference it.
unsafe impl Send for ChunkMeta {}
// SAFETY: a list does not change, so threads may read it at the same time.
unsafe impl Sync for ChunkMeta {}

/// A structure that the program allocates and the library fills.
///
/// The first field is `size_t size`. The program sets it to the size of the structure in its own firn.h, so that
/// later versions of the library can add fields.
///
/// # Safety
/// The type must be `repr(C)`, begin with a `usize` and have no padding.
pub(crate) unsafe trait CallerSized: Copy {}

const IN_MEMORY: u32 = 0;
const IN_SPILL: u32 = 1;
const IN_BACKING: u32 = 2;
const IN_MEMORY_FILE: u32 = 4;
const IN_HOLE: u32 = 3;
const NO_CHUNK: u32 = u32::MAX;

/// Runs `work`, stores the message of its error, and returns the errno value. No panic unwinds out of this function.
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

/// A path from C. The pointer is null or points to a zero-terminated string that does not change during `'a`.
#[repr(transparent)]
pub struct CPath<'a> {
    start: *const c_char,
    string: PhantomData<&'a CStr>,
}

impl<'a> CPath<'a> {
    /// Returns the path. Fails if the pointer is null.
    fn path(self) -> Result<&'a Path, Error> {
        if self.start.is_null() {
            return Err(Error::Argument("the path is a null pointer"));
        }
        // SAFETY: only C makes values of this type, and firn.h demands a string if the pointer is not null.
        let string = unsafe { CStr::from_ptr(self.start) };
        Ok(Path::new(OsStr::from_bytes(string.to_bytes())))
    }
}

/// A place from C for a structure. The pointer is null, or the place is as large as its first word, `size`, says.
#[repr(transparent)]
pub struct CallerPlace<'a, T> {
    start: *mut T,
    place: PhantomData<&'a mut T>,
}

impl<T: CallerSized> CallerPlace<'_, T> {
    /// Fills the structure up to its `size`.
    ///
    /// Fields that the program's structure lacks are not written. Fields that this version of the library does not
    /// know are zeroed.
    fn fill(self, value: T) -> Result<(), Error> {
        if self.start.is_null() {
            return Err(Error::Argument(NO_PLACE));
        }
        const HEAD: usize = size_of::<usize>();
        // SAFETY: only C makes values of this type, and firn.h demands that the first word is set if it is not null.
        let size = unsafe { self.start.cast::<usize>().read() };
        if size < HEAD {
            return Err(Error::Argument(
                "the field `size` of the structure is not set: set it to the sizeof of the structure first",
            ));
        }
        let known = size.min(size_of::<T>());
        let from = (&raw const value).cast::<u8>();
        // SAFETY: both structures have `known` bytes, and the program's has `size`. Its field `size` is not changed.
        unsafe {
            let to = self.start.cast::<u8>();
            std::ptr::copy_nonoverlapping(from.add(HEAD), to.add(HEAD), known - HEAD);
            to.add(known).write_bytes(0, size - known);
        }
        Ok(())
    }
}

/// A place from C for a value. The pointer is null or writable.
type OutPlace<'a, T> = Option<&'a mut MaybeUninit<T>>;

fn mount_of(handle: Option<&Handle>) -> Result<&Arc<OpenMount>, Error> {
    let handle = handle.ok_or(Error::Argument(NO_HANDLE))?;
    Ok(&handle.0)
}

const NO_HANDLE: &str = "the handle is a null pointer";
const NO_PLACE: &str = "the place for the answer is a null pointer";

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
#[unsafe(no_mangle)]
pub extern "C" fn firn_open(path: CPath<'_>, handle: OutPlace<'_, Box<Handle>>) -> c_int {
    guarded(|| {
        let place = handle.ok_or(Error::Argument(
            "the place for the handle is a null pointer",
        ))?;
        let mount = OpenMount::open(path.path()?)?;
        let paths = RegionPaths::of(&mount)?;
        place.write(Box::new(Handle(Arc::new(mount), paths)));
        Ok(())
    })
}

/// `firn_close`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_close(handle: Option<Box<Handle>>) {
    guarded(|| {
        if let Some(handle) = handle {
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

fn region_of(Handle(mount, paths): &Handle) -> Region {
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
#[unsafe(no_mangle)]
pub extern "C" fn firn_get_data_region(
    handle: Option<&Handle>,
    to: CallerPlace<'_, Region>,
) -> c_int {
    guarded(|| {
        let handle = handle.ok_or(Error::Argument(NO_HANDLE))?;
        to.fill(region_of(handle))
    })
}

/// `firn_map_region`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_map_region(handle: Option<&Handle>, to: CallerPlace<'_, Region>) -> c_int {
    guarded(|| {
        let handle = handle.ok_or(Error::Argument(NO_HANDLE))?;
        handle.0.map_region()?;
        to.fill(region_of(handle))
    })
}

// ---- chunk lists ---------------------------------------------------------------------------------

fn meta(mount: &OpenMount, piece: &ChunkPiece) -> Result<ChunkMeta, Error> {
    let place = match piece.place {
        Place::Memory => IN_MEMORY,
        Place::Spill => IN_SPILL,
        Place::MemoryFile => IN_MEMORY_FILE,
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
        IN_MEMORY_FILE => Place::MemoryFile,
        IN_BACKING => Place::Backing,
        IN_HOLE => Place::Hole,
        _ => return Err(Error::Argument("the piece is not in this mount")),
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
#[unsafe(no_mangle)]
pub extern "C" fn firn_get_chunk_meta_list(
    handle: Option<&Handle>,
    path: CPath<'_>,
    to: OutPlace<'_, Box<ChunkListHandle>>,
) -> c_int {
    guarded(|| {
        let place = to.ok_or(Error::Argument("the place for the list is a null pointer"))?;
        let mount = mount_of(handle)?;
        let list = ChunkList::request(mount, path.path()?)?;
        let pieces = list
            .pieces
            .iter()
            .map(|piece| meta(mount, piece))
            .collect::<Result<_, _>>()?;
        place.write(Box::new(ChunkListHandle { list, pieces }));
        Ok(())
    })
}

/// `firn_chunk_list_bytes`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_chunk_list_bytes(list: Option<&ChunkListHandle>) -> u64 {
    list.map_or(0, |list| list.list.bytes)
}

/// `firn_chunk_list_count`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_chunk_list_count(list: Option<&ChunkListHandle>) -> usize {
    list.map_or(0, |list| list.pieces.len())
}

/// `firn_chunk_list_pieces`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_chunk_list_pieces(list: Option<&ChunkListHandle>) -> *const ChunkMeta {
    list.map_or(std::ptr::null(), |list| list.pieces.as_ptr())
}

/// `firn_chunk_list_check`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_chunk_list_check(
    list: Option<&ChunkListHandle>,
    changed: OutPlace<'_, c_int>,
) -> c_int {
    guarded(|| {
        let list = list.ok_or(Error::Argument("the list is a null pointer"))?;
        let was_changed = list.list.was_changed()?;
        if let Some(changed) = changed {
            changed.write(c_int::from(was_changed));
        }
        Ok(())
    })
}

/// `firn_chunk_list_free`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_chunk_list_free(list: Option<Box<ChunkListHandle>>) {
    guarded(|| {
        drop(list);
        Ok(())
    });
}

/// `firn_read_chunk`.
///
/// # Safety
/// `buffer` is writable for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_read_chunk(
    handle: Option<&Handle>,
    piece: Option<&ChunkMeta>,
    from: u64,
    buffer: *mut c_void,
    bytes: usize,
) -> c_int {
    guarded(|| {
        let mount = mount_of(handle)?;
        let piece = piece.ok_or(Error::Argument("the piece is a null pointer"))?;
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
        // SAFETY: firn.h demands a buffer that is writable for `bytes` bytes and used by no other thread.
        unsafe { mount.read_piece(&piece, from, buffer.cast(), bytes) }?;
        Ok(())
    })
}
