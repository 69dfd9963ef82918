//! The content of a simulated file: sparse pages, which snapshots share until one of them is written.
//!
//! Invariants
//! * No page starts at or after `size`, except those that fallocate(2) put there.
//! * Bytes of a page beyond `size` are zero.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::RngExt;

/// Granularity of allocation, and therefore of holes, as in usual file systems.
pub const PAGE_BYTES: u64 = 4096;
/// Number of bytes that a disk writes completely or not at all.
const SECTOR_BYTES: usize = 512;

type Page = [u8; PAGE_BYTES as usize];

/// The bytes of one file.
#[derive(Clone, Default)]
pub struct Data {
    pages: BTreeMap<u64, Arc<Page>>,
    pub(super) size: u64,
}

impl Data {
    pub(super) fn page_count(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Returns the number of pages that a write of `len` bytes at `offset` would add.
    pub(super) fn pages_missing(&self, offset: u64, len: u64) -> u64 {
        if len == 0 {
            return 0;
        }
        let first = offset / PAGE_BYTES;
        let last = (offset + len - 1) / PAGE_BYTES;
        last - first + 1 - self.pages.range(first..=last).count() as u64
    }

    pub(super) fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        let len = self.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        for (page, within, part) in parts(offset, len) {
            let to = &mut buf[part];
            match self.pages.get(&page) {
                Some(bytes) => to.copy_from_slice(&bytes[within..within + to.len()]),
                None => to.fill(0),
            }
        }
        len
    }

    pub(super) fn write(&mut self, bytes: &[u8], offset: u64) {
        for (page, within, part) in parts(offset, bytes.len()) {
            let from = &bytes[part];
            Arc::make_mut(self.page(page))[within..within + from.len()].copy_from_slice(from);
        }
        if !bytes.is_empty() {
            self.size = self.size.max(offset + bytes.len() as u64);
        }
    }

    fn page(&mut self, page: u64) -> &mut Arc<Page> {
        self.pages
            .entry(page)
            .or_insert_with(|| Arc::new([0; PAGE_BYTES as usize]))
    }

    pub(super) fn set_len(&mut self, len: u64) {
        let _beyond = self.pages.split_off(&len.div_ceil(PAGE_BYTES));
        let cut = (len % PAGE_BYTES) as usize;
        if cut != 0
            && let Some(page) = self.pages.get_mut(&(len / PAGE_BYTES))
        {
            Arc::make_mut(page)[cut..].fill(0);
        }
        self.size = len;
    }

    /// Adds pages of zeros for the parts of the range that have none.
    pub(super) fn allocate(&mut self, offset: u64, len: u64) {
        for (page, ..) in parts(offset, len as usize) {
            self.page(page);
        }
    }

    /// Zeroes a range. Pages that are completely in the range become holes.
    pub(super) fn punch(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        let pages: Vec<u64> = self
            .pages
            .range(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES))
            .map(|p| *p.0)
            .collect();
        for page in pages {
            let start = page * PAGE_BYTES;
            let from = offset.max(start) - start;
            let to = end.min(start + PAGE_BYTES) - start;
            if (from, to) == (0, PAGE_BYTES) {
                self.pages.remove(&page);
            } else {
                Arc::make_mut(self.page(page))[from as usize..to as usize].fill(0);
            }
        }
    }

    /// Returns the first offset, from `offset` on, that is in a page (`data`) or in a hole (`!data`). The end of the
    /// file is a hole.
    pub(super) fn seek(&self, offset: u64, data: bool) -> Option<u64> {
        let mut at = offset;
        while at < self.size {
            if self.pages.contains_key(&(at / PAGE_BYTES)) == data {
                return Some(at);
            }
            at = if data {
                self.pages.range(at / PAGE_BYTES..).next()?.0 * PAGE_BYTES
            } else {
                (at / PAGE_BYTES + 1) * PAGE_BYTES
            };
        }
        (!data && offset < self.size).then_some(self.size)
    }

    /// Returns a content that the disk may have after a power failure during the change from `old` to `self`. Each
    /// sector, and the size, is the old or the new one.
    pub(super) fn torn(&self, old: &Data, rng: &mut impl RngExt) -> Data {
        let mut torn = old.clone();
        let pages: std::collections::BTreeSet<u64> =
            self.pages.keys().chain(old.pages.keys()).copied().collect();
        let zeros = [0; PAGE_BYTES as usize];
        for index in pages {
            let new = self.pages.get(&index);
            if old.pages.get(&index) == new {
                continue;
            }
            let new: &Page = new.map_or(&zeros, |p| &**p);
            let page = Arc::make_mut(torn.page(index));
            for at in (0..page.len()).step_by(SECTOR_BYTES) {
                if rng.random() {
                    let sector = at..at + SECTOR_BYTES;
                    page[sector.clone()].copy_from_slice(&new[sector]);
                }
            }
        }
        torn.set_len(if rng.random() { self.size } else { old.size });
        torn
    }
}

/// Divides a range of a file at the bounds of pages. Each item is the index of a page, the offset in that page, and the
/// range in the buffer.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let within = (at % PAGE_BYTES) as usize;
        let count = (PAGE_BYTES as usize - within).min(len - done);
        let part = done..done + count;
        done += count;
        Some((at / PAGE_BYTES, within, part))
    })
}
