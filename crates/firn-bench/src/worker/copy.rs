//! Copies bytes with memcpy. Nothing that keeps bytes in memory can take less time.
//!
//! A shared region is a file on tmpfs with all its memory allocated, in huge pages if the kernel provides them. Each
//! worker maps its part of the region anew, as a new process must. The page tables are therefore filled during the
//! copy, as they are for a process that writes to an arena.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use serde::{Deserialize, Serialize};

/// Size of a huge page. The address of a mapping and the offset in the file must be equal modulo this size, or the
/// kernel does not use huge pages.
const HUGE_BYTES: usize = 2 << 20;

/// Copies `bytes` in blocks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Copy {
    /// The region to or from which the bytes are copied.
    pub region: Region,
    /// The direction of the copy.
    pub way: Way,
    /// Total number of bytes.
    pub bytes: u64,
    /// Bytes of one memcpy. All copies use the same buffer of this length.
    pub block_bytes: u64,
}

/// The memory that is copied to or from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// Memory of the process, which was touched before.
    Private,
    /// A part of a file on tmpfs that [`make_region`] made.
    Shared {
        /// The file.
        path: PathBuf,
        /// Offset at which the part begins, a multiple of 2 MiB.
        offset: u64,
    },
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// From the buffer to the region.
    In,
    /// From the region to the buffer.
    Out,
}

impl Copy {
    /// Returns the memory of a private region. Returns an empty one if the region is shared.
    pub(super) fn private(&self) -> Vec<u8> {
        match self.region {
            Region::Private => vec![1; self.bytes as usize],
            Region::Shared { .. } => Vec::new(),
        }
    }

    /// Copies all bytes. `private` is the memory of a private region.
    pub(super) fn run(&self, buffer: &mut [u8], private: &mut [u8]) -> anyhow::Result<()> {
        match &self.region {
            Region::Private => self.copy_blocks(private, buffer),
            Region::Shared { path, offset } => {
                let mut map = Map::map_file(path, *offset, self.bytes as usize)?;
                self.copy_blocks(map.bytes(), buffer);
            }
        }
        Ok(())
    }

    /// Copies between `region` and `buffer`, block after block.
    fn copy_blocks(&self, region: &mut [u8], buffer: &mut [u8]) {
        for part in region.chunks_mut(buffer.len()) {
            match self.way {
                Way::In => part.copy_from_slice(&buffer[..part.len()]),
                Way::Out => buffer[..part.len()].copy_from_slice(part),
            }
            std::hint::black_box((&part, &buffer));
        }
    }
}

/// Creates the file of a shared region and allocates its memory, in huge pages if possible.
pub fn make_region(path: &Path, bytes: u64) -> anyhow::Result<()> {
    const MADV_COLLAPSE: i32 = 25;
    File::create_new(path)
        .and_then(|file| file.set_len(bytes))
        .with_context(|| format!("cannot make {}", path.display()))?;
    let mut map = Map::map_file(path, 0, bytes as usize)?;
    map.bytes().fill(1);
    // SAFETY: it changes no contents, and the range is the whole mapping. Where it fails, pages stay small.
    unsafe { libc::madvise(map.at.cast(), map.len, MADV_COLLAPSE) };
    Ok(())
}

/// A shared mapping at an address that is suitable for huge pages.
struct Map {
    /// Address of the first byte of the mapped part of the file.
    at: *mut u8,
    /// Number of mapped bytes.
    len: usize,
    /// Address and size of the reserved addresses, in which the mapping lies.
    reserved: (*mut u8, usize),
}

impl Map {
    /// Maps `len` bytes of a file from `offset` on, at an address that is suitable for huge pages. For that it reserves
    /// more addresses than the bytes need.
    fn map_file(path: &Path, offset: u64, len: usize) -> anyhow::Result<Self> {
        let file = File::options().read(true).write(true).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let no_access = ProtFlags::empty();
        let read_write = ProtFlags::READ | ProtFlags::WRITE;
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let reserved_bytes = len + HUGE_BYTES;
        // SAFETY: the first mapping is new and at an address that the kernel chooses. The second mapping replaces a
        // part of it, which nothing refers to.
        unsafe {
            let start = mmap_anonymous(std::ptr::null_mut(), reserved_bytes, no_access, reserve)?
                .cast::<u8>();
            let at = start.add(start.align_offset(HUGE_BYTES));
            let map = Self {
                at,
                len,
                reserved: (start, reserved_bytes),
            };
            mmap(
                at.cast(),
                len,
                read_write,
                MapFlags::SHARED | MapFlags::FIXED,
                file.as_fd(),
                offset,
            )?;
            Ok(map)
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes are mapped as long as `self` lives. Other processes use other parts of the file.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: what `of` reserved, the mapping within it included.
        let _ = unsafe { munmap(self.reserved.0.cast(), self.reserved.1) };
    }
}
