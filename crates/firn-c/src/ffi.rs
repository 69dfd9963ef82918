//! The functions and types that C uses. They only check and translate pointers. firn.h, which a C program includes,
//! documents them.
//!
//! The types of the arguments are pointers in C and express what firn.h requires of the program. `Option<&T>` is a
//! reference that may be null. `Option<Box<T>>` is a box that the program gives back. [`CPath`] is a string.
//! [`CallerPlace`] is a structure whose size the program sets. Only C creates values of these types, under the rules
//! of firn.h, so the code below can rely on them and is mostly safe code.

use std::any::Any;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr::null;
use std::sync::Arc;

use firn_client::{ChunkList, OpenMount};
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkPiece, Place};

use crate::error::{self, Error};

mod checkpoints;
mod state;
mod transaction;

/// `struct firn`.
pub struct Handle {
    /// The mount, with a connection to its firnd.
    mount: Arc<OpenMount>,
    /// The paths to which the fields of [`Region`] point.
    region_paths: RegionPaths,
}

/// The paths of the files with a mount's bytes in memory, as C strings: of the arena, and of the spill file if there is
/// one (on a local device, for bytes that do not fit into the arena).
struct RegionPaths {
    /// Path of the arena.
    arena: CString,
    /// Path of the spill file. `None` means that there is none.
    spill: Option<CString>,
}

/// `struct firn_chunk_list`: where each byte of a file is. A piece is a range of the file that is in one place.
pub struct ChunkListHandle {
    /// The list. The bytes stay in their places until it is dropped.
    list: ChunkList,
    /// The pieces of the file, in the form for C.
    pieces: Vec<ChunkMeta>,
}

/// `struct firn_data_region`: the part of the arena that has files' bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Region {
    /// Size of this struct in the program.
    size: usize,
    /// Address of the region in this process. Null means that it is not mapped.
    address: *const c_void,
    /// Size of the region in bytes.
    bytes: u64,
    /// Size of a page of the region in bytes.
    page_bytes: u64,
    /// Size of a chunk in bytes.
    chunk_bytes: u64,
    /// Path of the arena.
    path: *const c_char,
    /// Offset of the region in the arena.
    offset: u64,
    /// Address of the spill file in this process. Null means that it is not mapped.
    spill_address: *const c_void,
    /// Size of the spill file in bytes. 0 means that there is none.
    spill_bytes: u64,
    /// Path of the spill file. Null means that there is none.
    spill_path: *const c_char,
}

const _: () = assert!(size_of::<Region>() == 80);
// SAFETY: `repr(C)`, all bits are fields without padding, and the first is `size`.
unsafe impl CallerSized for Region {}

/// `struct firn_chunk_meta`.
#[derive(Debug)]
#[repr(C)]
pub struct ChunkMeta {
    /// Offset of the piece in the file.
    offset: u64,
    /// Length of the piece in bytes.
    bytes: u64,
    /// Offset of the bytes in their place.
    at: u64,
    /// Address of the bytes in this process. Null means that they are not in mapped memory.
    address: *const c_void,
    /// The place of the bytes: `IN_MEMORY` or one of the numbers after it.
    place: u32,
    /// Index of the chunk, or `NO_CHUNK`.
    chunk: u32,
    /// Always 0.
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
    let error = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(panic) => Error::Fault(panic_message(&*panic).to_owned()),
    };
    error::store_message(&error);
    error.errno()
}

/// Returns the text of a panic, if it has one.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "a panic"
    }
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
    /// Copies `value` into the program's structure, up to the size that the program has set in its first field.
    ///
    /// The program may be older or newer than this library. Fields that its structure lacks are not written. Fields
    /// that this version of the library does not know are zeroed. Fails for a null pointer or a size that was not set.
    fn fill(self, value: T) -> Result<(), Error> {
        /// Bytes of the field `size`, which the program has set.
        const SIZE_FIELD_BYTES: usize = size_of::<usize>();
        if self.start.is_null() {
            return Err(Error::Argument(NO_PLACE));
        }
        // SAFETY: only C makes values of this type, and firn.h demands that the first word is set if it is not null.
        let target_bytes = unsafe { self.start.cast::<usize>().read() };
        if target_bytes < SIZE_FIELD_BYTES {
            return Err(Error::Argument(
                "the field `size` of the structure is not set: set it to the sizeof of the structure first",
            ));
        }
        let common_bytes = target_bytes.min(size_of::<T>());
        let source = (&raw const value).cast::<u8>();
        let target = self.start.cast::<u8>();
        // SAFETY: both structures have `common_bytes`, and the program's has `target_bytes`. Its field `size` is not
        // changed.
        unsafe {
            std::ptr::copy_nonoverlapping(
                source.add(SIZE_FIELD_BYTES),
                target.add(SIZE_FIELD_BYTES),
                common_bytes - SIZE_FIELD_BYTES,
            );
            let unknown_fields = target.add(common_bytes);
            unknown_fields.write_bytes(0, target_bytes - common_bytes);
        }
        Ok(())
    }
}

/// A place from C for a value. The pointer is null or writable.
type OutPlace<'a, T> = Option<&'a mut MaybeUninit<T>>;

fn mount_of(handle: Option<&Handle>) -> Result<&Arc<OpenMount>, Error> {
    match handle {
        Some(handle) => Ok(&handle.mount),
        None => Err(Error::Argument(NO_HANDLE)),
    }
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
    error::last_message()
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
        let region_paths = RegionPaths::from_mount(&mount)?;
        place.write(Box::new(Handle {
            mount: Arc::new(mount),
            region_paths,
        }));
        Ok(())
    })
}

/// `firn_close`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_close(handle: Option<Box<Handle>>) {
    guarded(|| {
        if let Some(handle) = handle {
            handle.mount.close();
        }
        Ok(())
    });
}

// ---- the data region -----------------------------------------------------------------------------

impl RegionPaths {
    fn from_mount(mount: &OpenMount) -> Result<Self, Error> {
        let c_string = |path: &BytePath| {
            CString::new(path.as_bytes()).map_err(|_| Error::Argument("a path with a zero byte"))
        };
        let region = mount.region();
        Ok(Self {
            arena: c_string(&region.path)?,
            spill: match &region.spill {
                Some(spill) => Some(c_string(&spill.path)?),
                None => None,
            },
        })
    }
}

/// Returns the C description of where a mount has the bytes of files: in the data region of the arena (a file in shared
/// memory), and in the spill file on a local device. The addresses are null until this process has mapped them.
fn region_of(handle: &Handle) -> Region {
    let mapped_files = handle.mount.mapping();
    let mapped_spill = mapped_files.and_then(|files| files.spill.as_ref());
    let spill_path = handle.region_paths.spill.as_ref();
    let region = handle.mount.region();
    Region {
        size: size_of::<Region>(),
        address: mapped_files.map_or(null(), |files| files.region.start().cast()),
        bytes: region.bytes,
        page_bytes: region.page_bytes,
        chunk_bytes: region.chunk_bytes,
        path: handle.region_paths.arena.as_ptr(),
        offset: region.offset,
        spill_address: mapped_spill.map_or(null(), |spill| spill.view.start().cast()),
        // The whole file is mapped, so its header counts too.
        spill_bytes: match &region.spill {
            Some(spill) => spill.offset + spill.bytes,
            None => 0,
        },
        spill_path: spill_path.map_or(null(), |path| path.as_ptr()),
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
        handle.mount.map_region()?;
        to.fill(region_of(handle))
    })
}

// ---- chunk lists ---------------------------------------------------------------------------------

/// Converts a piece (an extent: a range of a file and the place of its bytes) for C. The address is null if the bytes
/// are not in mapped memory. Fails if the piece is outside the mapping.
fn meta_from_piece(mount: &OpenMount, piece: &ChunkPiece) -> Result<ChunkMeta, Error> {
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
        address: address.unwrap_or(null()).cast(),
        place,
        chunk: piece.chunk.unwrap_or(NO_CHUNK),
        reserved: [0; 2],
    })
}

/// Converts a piece (a range of a file and the place of its bytes) that C has passed back. The program may have changed
/// it: fails if the number of its place is not valid. Its range is checked when it is read.
fn piece_from_meta(meta: &ChunkMeta) -> Result<ChunkPiece, Error> {
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
        let mut pieces = Vec::with_capacity(list.pieces.len());
        for piece in &list.pieces {
            pieces.push(meta_from_piece(mount, piece)?);
        }
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
    list.map_or(null(), |list| list.pieces.as_ptr())
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
        let meta = piece.ok_or(Error::Argument("the piece is a null pointer"))?;
        let end = from.checked_add(bytes as u64);
        if end.is_none_or(|end| end > meta.bytes) {
            return Err(Error::Argument("the range is not within the piece"));
        }
        if bytes == 0 {
            return Ok(());
        }
        if buffer.is_null() {
            return Err(Error::Argument("the buffer is a null pointer"));
        }
        let piece = piece_from_meta(meta)?;
        // SAFETY: firn.h demands a buffer that is writable for `bytes` bytes and used by no other thread.
        unsafe { mount.read_piece(&piece, from, buffer.cast(), bytes) }?;
        Ok(())
    })
}
