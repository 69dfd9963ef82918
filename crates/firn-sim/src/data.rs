//! The content of a simulated file: sparse pages, which snapshots share until one of them is written.
//!
//! Invariants
//! * No page starts at or after `size`, except those that fallocate(2) put there.
//! * Bytes of a page beyond `size` are zero.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
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
        for part in split_at_pages(offset, len) {
            let target = &mut buf[part.in_buf.clone()];
            match self.pages.get(&part.page) {
                Some(page) => target.copy_from_slice(&page[part.in_page]),
                None => target.fill(0),
            }
        }
        len
    }

    pub(super) fn write(&mut self, bytes: &[u8], offset: u64) {
        for part in split_at_pages(offset, bytes.len()) {
            let page = Arc::make_mut(self.find_or_add_page(part.page));
            page[part.in_page].copy_from_slice(&bytes[part.in_buf]);
        }
        if !bytes.is_empty() {
            self.size = self.size.max(offset + bytes.len() as u64);
        }
    }

    /// Returns a page. Adds a page of zeros if there is none.
    fn find_or_add_page(&mut self, page: u64) -> &mut Arc<Page> {
        self.pages
            .entry(page)
            .or_insert_with(|| Arc::new([0; PAGE_BYTES as usize]))
    }

    pub(super) fn set_len(&mut self, len: u64) {
        let _removed_pages = self.pages.split_off(&len.div_ceil(PAGE_BYTES));
        let end_in_page = (len % PAGE_BYTES) as usize;
        if end_in_page != 0
            && let Some(page) = self.pages.get_mut(&(len / PAGE_BYTES))
        {
            Arc::make_mut(page)[end_in_page..].fill(0);
        }
        self.size = len;
    }

    /// Adds pages of zeros for the parts of the range that have none.
    pub(super) fn allocate(&mut self, offset: u64, len: u64) {
        for part in split_at_pages(offset, len as usize) {
            self.find_or_add_page(part.page);
        }
    }

    /// Zeroes a range. Pages that are completely in the range become holes.
    pub(super) fn punch(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        let pages: Vec<u64> = self
            .pages
            .range(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES))
            .map(|(page, _)| *page)
            .collect();
        for page in pages {
            let page_start = page * PAGE_BYTES;
            let from = offset.max(page_start) - page_start;
            let to = end.min(page_start + PAGE_BYTES) - page_start;
            let is_whole_page = (from, to) == (0, PAGE_BYTES);
            if is_whole_page {
                self.pages.remove(&page);
            } else {
                Arc::make_mut(self.find_or_add_page(page))[from as usize..to as usize].fill(0);
            }
        }
    }

    /// Returns the first offset, from `offset` on, that is in a page (with `wants_data`) or else in a hole. Every
    /// file has a hole at its end. Returns `None` if there is no such offset.
    pub(super) fn seek(&self, offset: u64, wants_data: bool) -> Option<u64> {
        let mut position = offset;
        while position < self.size {
            let page = position / PAGE_BYTES;
            if self.pages.contains_key(&page) == wants_data {
                return Some(position);
            }
            let next_page = if wants_data {
                *self.pages.range(page..).next()?.0
            } else {
                page + 1
            };
            position = next_page * PAGE_BYTES;
        }
        // The hole at the end is found only from within the file, as by lseek(2).
        let is_hole_at_end = !wants_data && offset < self.size;
        is_hole_at_end.then_some(self.size)
    }

    /// Returns a content that the disk may have after a power failure, chosen by `rng`. `old` is the durable content,
    /// and `self` has the unsynced writes. Each sector, and the size, is the old or the new one.
    pub(super) fn torn(&self, old: &Data, rng: &mut impl RngExt) -> Data {
        let mut torn = old.clone();
        let pages: BTreeSet<u64> = self.pages.keys().chain(old.pages.keys()).copied().collect();
        let zeros = [0; PAGE_BYTES as usize];
        for index in pages {
            let new_page = self.pages.get(&index);
            if old.pages.get(&index) == new_page {
                continue;
            }
            let new_bytes: &Page = new_page.map_or(&zeros, |page| &**page);
            let torn_page = Arc::make_mut(torn.find_or_add_page(index));
            for start in (0..torn_page.len()).step_by(SECTOR_BYTES) {
                if rng.random() {
                    let sector = start..start + SECTOR_BYTES;
                    torn_page[sector.clone()].copy_from_slice(&new_bytes[sector]);
                }
            }
        }
        torn.set_len(if rng.random() { self.size } else { old.size });
        torn
    }
}

/// The part of a range of a file that lies in one page.
struct PagePart {
    /// Index of the page.
    page: u64,
    /// Range in the page.
    in_page: Range<usize>,
    /// Range in the buffer for the whole range.
    in_buf: Range<usize>,
}

/// Splits a range of a file, `len` bytes from `offset` on, at the bounds of pages.
fn split_at_pages(offset: u64, len: usize) -> impl Iterator<Item = PagePart> {
    let mut buf_start = 0;
    std::iter::from_fn(move || {
        if buf_start == len {
            return None;
        }
        let position = offset + buf_start as u64;
        let page_start = (position % PAGE_BYTES) as usize;
        let bytes = (PAGE_BYTES as usize - page_start).min(len - buf_start);
        let in_buf = buf_start..buf_start + bytes;
        buf_start += bytes;
        Some(PagePart {
            page: position / PAGE_BYTES,
            in_page: page_start..page_start + bytes,
            in_buf,
        })
    })
}
