//! Maps the memory of a mount into this process, so that it can read bytes without a request to firnd, the process that
//! serves the mount.
//!
//! Terms
//! * *arena*: a file in shared memory with the bytes that are not in the backing (the served directory) yet.
//! * *data region*: the part of the arena that has files' bytes. Before it is the superblock, with the arena's uuid.
//! * *spill file*: a file on a local disk for bytes that do not fit into the arena.
//! * *memory file*: a file in memory with all bytes of one large file.
//!
//! Invariants
//! * The mapped files belong to the arena that firnd named: the superblock and the header of the spill file have its
//!   uuid.
//! * Every copy stays within the mapping; this module checks the range.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

use firn_format::geometry::DATA_ALIGN;
use firn_format::memory_file::memory_file_name;
use firn_format::spill::{SPILL_HEADER_BYTES, SpillHeader};
use firn_format::superblock::{SUPERBLOCK_BYTES, Superblock};
use firn_protocol::path::BytePath;
use firn_protocol::{DataRegion, SpillRegion};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::open_mount::MountError;

const PAGE: usize = firn_format::geometry::PAGE as usize;

/// The mapped arena and the mapped spill file.
pub struct Mapping {
    /// The data region of the arena.
    pub region: View,
    /// The open arena file.
    pub(crate) arena: OwnedFd,
    /// The spill file. `None` if the mount has none.
    pub spill: Option<Spill>,
}

/// The spill file. It is read with read(2), which returns an error where a load from the mapping would kill the
/// process.
pub struct Spill {
    /// A mapping of the whole file.
    pub view: View,
    /// The open spill file.
    file: OwnedFd,
    /// Path of the spill file.
    path: BytePath,
}

impl Mapping {
    /// Opens and maps the arena, the shared memory with files' bytes, and its spill file for further bytes, if there is
    /// one. `region` is what firnd, which serves the mount, has said about them.
    ///
    /// Fails if a file does not have the uuid of `region`: it then belongs to another arena.
    pub(crate) fn new(region: &DataRegion) -> Result<Self, MountError> {
        let FileWithHead { file: arena, head } = open_with_head(&region.path, SUPERBLOCK_BYTES)?;
        let foreign_error = |why: String| MountError::Foreign {
            path: region.path.clone(),
            why,
        };
        let superblock =
            Superblock::decode(&head).map_err(|error| foreign_error(error.to_string()))?;
        check_uuid(&superblock.uuid, region).map_err(foreign_error)?;
        let spill = match &region.spill {
            Some(spill) => Some(Spill::open(spill, region)?),
            None => None,
        };
        Ok(Self {
            region: View::new(&arena, &region.path, region.offset, region.bytes)?,
            arena,
            spill,
        })
    }
}

impl Spill {
    /// Opens and maps the spill file. Fails if the file does not belong to the arena of `region`.
    fn open(spill: &SpillRegion, region: &DataRegion) -> Result<Self, MountError> {
        let path = spill.path.clone();
        let FileWithHead { file, head } = open_with_head(&path, SPILL_HEADER_BYTES)?;
        let foreign_error = |why: String| MountError::Foreign {
            path: path.clone(),
            why,
        };
        let header =
            SpillHeader::decode(&head).map_err(|error| foreign_error(error.to_string()))?;
        check_uuid(&header.uuid, region).map_err(foreign_error)?;
        let file_bytes = spill.offset.saturating_add(spill.bytes);
        let view = View::new(&file, &path, 0, file_bytes)?;
        Ok(Self { view, file, path })
    }

    /// Reads `len` bytes at an offset of the file.
    ///
    /// # Safety
    /// `target` must be writable for `len` bytes.
    pub(crate) unsafe fn read(
        &self,
        offset: u64,
        target: *mut u8,
        len: usize,
    ) -> Result<(), MountError> {
        // SAFETY: as the caller promises.
        unsafe { read_range(&self.file, &self.path, offset, target, len) }
    }
}

/// Reads `len` bytes at an offset of a file into the memory at `target`. Fails with EIO if the file is shorter. `path`
/// is only for errors.
///
/// # Safety
/// `target` must be writable for `len` bytes.
unsafe fn read_range(
    file: &OwnedFd,
    path: &BytePath,
    offset: u64,
    target: *mut u8,
    len: usize,
) -> Result<(), MountError> {
    let read_error = |errno| MountError::System {
        what: "read",
        path: path.clone(),
        errno,
    };
    let target = target.cast::<MaybeUninit<u8>>();
    // SAFETY: writable for `len` bytes, as the caller promises; C need not have written to it yet.
    let mut unfilled = unsafe { std::slice::from_raw_parts_mut(target, len) };
    let mut position = offset;
    while !unfilled.is_empty() {
        match rustix::io::pread(file, &mut *unfilled, position) {
            Ok(([], _)) => return Err(read_error(Errno::IO)),
            Ok((filled, _)) => {
                let count = filled.len();
                position += count as u64;
                unfilled = &mut unfilled[count..];
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(read_error(errno)),
        }
    }
    Ok(())
}

/// A memory file of the arena. Its name exists as long as a chunk list refers to it, so the file is opened for each
/// read.
pub(crate) struct MemoryFile {
    /// The open memory file.
    file: OwnedFd,
    /// Path of the memory file.
    path: BytePath,
}

impl MemoryFile {
    /// Opens the memory file `number` of the arena of `region`: a file in memory, beside the arena, with all bytes of
    /// one large file. Fails if it is not private to this user, because another user could then have made it.
    pub(crate) fn open(region: &DataRegion, number: u16) -> Result<Self, MountError> {
        let name = memory_file_name(region.path.as_path().as_os_str(), number);
        let path: BytePath = Path::new(&name).into();
        // A memory file has file bytes only, so there is no header to read and check.
        let no_head = 0;
        let file = open_with_head(&path, no_head)?.file;
        let stat = rustix::fs::fstat(&file).map_err(|errno| MountError::System {
            what: "stat",
            path: path.clone(),
            errno,
        })?;
        let uid = rustix::process::geteuid().as_raw();
        match firn_trust::FileMetadata::from_stat(&stat).check(firn_trust::Expected::File, uid) {
            Ok(()) => Ok(Self { file, path }),
            Err(why) => Err(MountError::Foreign {
                path,
                why: why.to_string(),
            }),
        }
    }

    /// Reads `len` bytes at an offset of the file.
    ///
    /// # Safety
    /// `target` must be writable for `len` bytes.
    pub(crate) unsafe fn read(
        &self,
        offset: u64,
        target: *mut u8,
        len: usize,
    ) -> Result<(), MountError> {
        // SAFETY: as the caller promises.
        unsafe { read_range(&self.file, &self.path, offset, target, len) }
    }
}

/// An open file and its first bytes.
struct FileWithHead {
    /// The open file.
    file: OwnedFd,
    /// Its first bytes.
    head: Vec<u8>,
}

/// Opens a file and reads its first `head_bytes` bytes, or fewer if the file is shorter.
fn open_with_head(path: &BytePath, head_bytes: usize) -> Result<FileWithHead, MountError> {
    let system_error = |what, errno| MountError::System {
        what,
        path: path.clone(),
        errno,
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path.as_path(), flags, Mode::empty())
        .map_err(|errno| system_error("open", errno))?;
    let mut head = vec![0; head_bytes];
    let read_bytes =
        rustix::io::pread(&file, &mut head[..], 0).map_err(|errno| system_error("read", errno))?;
    head.truncate(read_bytes);
    Ok(FileWithHead { file, head })
}

/// Fails if `uuid` is not the uuid of the arena of `region`.
fn check_uuid(uuid: &[u8; 16], region: &DataRegion) -> Result<(), String> {
    if base16ct::lower::encode_string(uuid) == region.uuid {
        Ok(())
    } else {
        Err("it belongs to another arena".into())
    }
}

/// A part of a file, mapped for reading.
pub struct View {
    /// Address of the first mapped byte.
    base: NonNull<u8>,
    /// Number of mapped bytes.
    len: usize,
}

// SAFETY: the mapping is read-only and lives as long as the value.
unsafe impl Send for View {}
// SAFETY: the mapping is read-only, so threads may read it at the same time.
unsafe impl Sync for View {}

impl View {
    /// Maps `bytes` bytes of a file from `offset` on for reading, at an address that is suitable for huge pages. Fails
    /// if the file is shorter, because a load past its end would kill the process. `path` is only for errors.
    fn new(file: impl AsFd, path: &BytePath, offset: u64, bytes: u64) -> Result<Self, MountError> {
        let map_error = |errno| MountError::System {
            what: "map",
            path: path.clone(),
            errno,
        };
        let file_bytes = rustix::fs::fstat(&file).map_err(map_error)?.st_size as u64;
        let is_too_short = offset.checked_add(bytes).is_none_or(|end| end > file_bytes);
        if is_too_short || bytes == 0 {
            return Err(MountError::Foreign {
                path: path.clone(),
                why: format!(
                    "it has {file_bytes} bytes, but must have {bytes} from offset {offset} on"
                ),
            });
        }
        let len = usize::try_from(bytes).map_err(|_| map_error(Errno::NOMEM))?;
        let base = map_aligned(file, offset, len).map_err(map_error)?;
        // The mapping is left out of core files of the program. An error is ignored: core files are then only larger.
        // SAFETY: the call changes no contents.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxDontDump) };
        Ok(Self { base, len })
    }

    /// Returns the address of the byte at an offset of the view. Returns `None` if fewer than `bytes` bytes follow.
    pub fn address(&self, offset: u64, bytes: u64) -> Option<*const u8> {
        let end = offset.checked_add(bytes)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: `offset` was just found to lie within the mapping.
        Some(unsafe { self.base.as_ptr().add(offset as usize).cast_const() })
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> *const u8 {
        self.base.as_ptr()
    }
}

/// Maps `len` bytes of a file from `offset` on for reading, and returns the address. The address is congruent to the
/// offset modulo the size of a huge page, because only then can the kernel use huge pages. The caller must unmap it.
fn map_aligned(file: impl AsFd, offset: u64, len: usize) -> Result<NonNull<u8>, Errno> {
    // A larger range is reserved, and the address is chosen in it.
    let align = DATA_ALIGN as usize;
    let reserved_len = len.checked_add(align).ok_or(Errno::NOMEM)?;
    let reserve_flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let any_address = std::ptr::null_mut();
    // SAFETY: the kernel chooses a free address for this new mapping.
    let reservation = unsafe {
        rustix::mm::mmap_anonymous(any_address, reserved_len, ProtFlags::empty(), reserve_flags)
    }?;
    let start = reservation as usize;
    let end = start + reserved_len.next_multiple_of(PAGE);
    let skip = (offset as usize).wrapping_sub(start) % align;
    let address = start + skip;
    let map_flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the mapping replaces pages of the reservation, to which nothing refers.
    let mapped = unsafe {
        rustix::mm::mmap(
            address as *mut _,
            len,
            ProtFlags::READ,
            map_flags,
            file,
            offset,
        )
    };
    // SAFETY: nothing refers to the unused parts of the reservation.
    unsafe {
        match mapped {
            Ok(base) => {
                unmap(start..address);
                unmap(address + len.next_multiple_of(PAGE)..end);
                Ok(NonNull::new(base.cast()).expect("the kernel maps no null"))
            }
            Err(errno) => {
                unmap(start..end);
                Err(errno)
            }
        }
    }
}

/// Unmaps a range of addresses, which may be empty.
///
/// # Safety
/// Nothing refers to the range, and it begins and ends with a page.
unsafe fn unmap(addresses: Range<usize>) {
    if !addresses.is_empty() {
        // SAFETY: as the caller promises.
        let _ = unsafe { rustix::mm::munmap(addresses.start as *mut _, addresses.len()) };
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping. The documentation says that addresses in it are invalid afterwards.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_begins_where_huge_pages_can_and_ends_with_its_bytes() {
        let file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..3 << 20).map(|at: u32| (at % 251) as u8).collect();
        std::io::Write::write_all(&mut &file, &data).unwrap();
        for (offset, bytes) in [(0, 3 << 20), (4096, 5000), (2 << 20, 1 << 20)] {
            let view = View::new(&file, &"file".into(), offset, bytes).unwrap();
            assert_eq!((view.start() as u64).wrapping_sub(offset) % DATA_ALIGN, 0);
            let at = view.address(bytes - 1, 1).unwrap();
            // SAFETY: within the view.
            assert_eq!(unsafe { *at }, data[(offset + bytes - 1) as usize]);
            assert_eq!(view.address(bytes, 1), None);
            assert_eq!(view.address(u64::MAX, 2), None);
        }
        let short = View::new(&file, &"file".into(), 4096, 3 << 20)
            .err()
            .unwrap()
            .to_string();
        assert!(
            short.contains("3149824") || short.contains("3145728"),
            "{short}"
        );
    }

    #[test]
    fn a_file_of_another_arena_is_not_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        std::fs::write(&path, vec![0; 1 << 16]).unwrap();
        let region = DataRegion {
            path: path.clone().into(),
            bytes: 4096,
            ..DataRegion::default()
        };
        let error = Mapping::new(&region).err().unwrap();
        assert_eq!(error.errno(), Errno::STALE.raw_os_error(), "{error}");
        let missing = DataRegion {
            path: "/no/such/arena".into(),
            ..region
        };
        assert_eq!(
            Mapping::new(&missing).err().unwrap().errno(),
            Errno::NOENT.raw_os_error()
        );
    }
}
