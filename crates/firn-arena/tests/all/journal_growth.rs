//! Tests of the memory under a journal.
//!
//! The journal reserves memory as it grows and releases it after a snapshot. If there is none left, an append fails and
//! no earlier record is lost.

use std::sync::{Arc, Mutex};

use firn_arena::journal::{Full, Journal, Medium, Memory, replay};
use firn_format::geometry::JOURNAL_STEP;
use firn_format::record::{Ending, Identity, Record};

const STEP: usize = JOURNAL_STEP as usize;
const PAGE: usize = 4096;
const HALF: usize = 16 * STEP;

/// The state of a medium, which the test sees while the journal uses the medium.
#[derive(Clone)]
struct State {
    bytes: Vec<u8>,
    /// For each page, whether it has memory.
    pages: Vec<bool>,
    /// The largest number of pages with memory.
    limit: usize,
    /// Copies of the bytes: after each store of a header's magic, and before, during and after each release.
    copies: Vec<Vec<u8>>,
}

impl State {
    fn pages_used(&self) -> usize {
        self.pages.iter().filter(|has| **has).count()
    }
    fn bytes_used(&self) -> usize {
        self.pages_used() * PAGE
    }
}

/// A medium with a limit on its memory. It asserts that each store goes to pages with memory.
#[derive(Clone)]
struct Scarce(Arc<Mutex<State>>);

impl Scarce {
    fn new(limit_bytes: usize) -> Self {
        let mut pages = vec![false; 2 * HALF / PAGE];
        pages[..STEP / PAGE].fill(true);
        pages[HALF / PAGE..(HALF + STEP) / PAGE].fill(true);
        let bytes = vec![0; 2 * HALF];
        Self(Arc::new(Mutex::new(State {
            bytes,
            pages,
            limit: limit_bytes / PAGE,
            copies: Vec::new(),
        })))
    }
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
    fn copy(&self) -> Memory {
        Memory(self.state().bytes.clone())
    }
}

impl Medium for Scarce {
    fn len(&self) -> usize {
        2 * HALF
    }
    fn write(&mut self, at: usize, bytes: &[u8]) {
        let mut state = self.state();
        let pages = at / PAGE..(at + bytes.len()).div_ceil(PAGE);
        assert!(
            state.pages[pages].iter().all(|has| *has),
            "a store where there is no memory"
        );
        state.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        if at.is_multiple_of(HALF) {
            let bytes = state.bytes.clone();
            state.copies.push(bytes);
        }
    }
    fn read(&self, at: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.state().bytes[at..at + bytes.len()]);
    }
    fn reserve(&mut self, at: usize, len: usize) -> bool {
        let mut state = self.state();
        let pages = at / PAGE..(at + len).div_ceil(PAGE);
        let new_pages = state.pages[pages.clone()]
            .iter()
            .filter(|has| !**has)
            .count();
        if state.pages_used() + new_pages > state.limit {
            return false;
        }
        state.pages[pages].fill(true);
        true
    }
    fn release(&mut self, at: usize, len: usize) {
        let mut state = self.state();
        let before = state.bytes.clone();
        state.bytes[at..at + len / 2].fill(0);
        let halfway = state.bytes.clone();
        state.bytes[at..at + len].fill(0);
        state.pages[at.div_ceil(PAGE)..(at + len) / PAGE].fill(false);
        let after = state.bytes.clone();
        state.copies.extend([before, halfway, after]);
    }
    fn data_len(&self, at: usize, len: usize) -> usize {
        let pages = &self.state().pages[at / PAGE..(at + len) / PAGE];
        pages
            .iter()
            .rposition(|has| *has)
            .map_or(0, |last| (last + 1) * PAGE)
    }
}

fn bind(file: u64) -> Record {
    let identity = Identity {
        dev: 1,
        ino: file,
        btime: None,
    };
    let path = format!("{}/{file}", "a-directory-with-a-name/".repeat(20)).into_bytes();
    Record::FileIdBegin {
        file,
        identity,
        paths: vec![path],
        ending: Ending::Open,
    }
}

#[test]
fn memory_comes_with_the_names_and_goes_with_them() {
    let medium = Scarce::new(2 * HALF);
    let mut journal = Journal::create(medium.clone());
    let fresh = medium.state().bytes_used();
    assert_eq!(fresh, 2 * STEP);
    let files = 5000;
    for file in 1..=files {
        journal.append(&bind(file)).expect("there is room");
    }
    let full = medium.state().bytes_used();
    assert!(full > 4 * fresh && full < 2 * HALF, "{full}");
    assert_eq!(&replay(&medium.copy()).ledger, journal.ledger());
    for file in 1..=files {
        journal
            .append_end(&Record::FileIdEnd { file })
            .expect("an end fits");
    }
    for file in files + 1..files + 1000 {
        journal.append(&bind(file)).expect("there is room");
        journal
            .append_end(&Record::FileIdEnd { file })
            .expect("an end fits");
    }
    let after = medium.state().bytes_used();
    assert!(after <= 8 * STEP, "{after} of {full}");
    let replayed = replay(&medium.copy());
    assert_eq!(
        (&replayed.ledger, &replayed.damage[..]),
        (journal.ledger(), &[][..])
    );
}

#[test]
fn a_crash_at_any_header_or_release_replays_to_what_was_there() {
    let medium = Scarce::new(2 * HALF);
    let mut journal = Journal::create(medium.clone());
    medium.state().copies.clear();
    let mut file = 0;
    let mut checked = 0;
    let mut check = |journal: &Journal<Scarce>, before: &firn_arena::journal::Ledger| {
        for bytes in std::mem::take(&mut medium.state().copies) {
            let replayed = replay(&Memory(bytes));
            assert_eq!(replayed.damage, []);
            let sizes = [replayed.ledger.len(), before.len(), journal.ledger().len()];
            assert!(
                &replayed.ledger == before || &replayed.ledger == journal.ledger(),
                "{sizes:?} {checked}"
            );
            checked += 1;
        }
    };
    for round in 0..4 {
        for _ in 0..1500 {
            file += 1;
            let before = journal.ledger().clone();
            journal.append(&bind(file)).expect("there is room");
            check(&journal, &before);
        }
        let first = file - 1499;
        for file in first..=file - 100 * round {
            let before = journal.ledger().clone();
            journal
                .append_end(&Record::FileIdEnd { file })
                .expect("an end fits");
            check(&journal, &before);
        }
        drop(journal);
        let replayed;
        (journal, replayed) = Journal::open(medium.clone());
        assert_eq!(replayed.damage, []);
        let ledger = journal.ledger().clone();
        check(&journal, &ledger);
    }
    assert!(checked > 30, "{checked}");
}

#[test]
fn without_memory_a_beginning_is_refused_and_ends_still_fit() {
    let medium = Scarce::new(7 * STEP);
    let mut journal = Journal::create(medium.clone());
    let mut files = 0;
    while journal.append(&bind(files + 1)).is_ok() {
        files += 1;
    }
    assert!(files > 500, "{files}");
    assert_eq!(journal.append(&bind(files + 1)), Err(Full));
    for file in 1..=files {
        journal
            .append_end(&Record::Ended {
                file,
                ending: Ending::Closed,
            })
            .ok();
    }
    let replayed = replay(&medium.copy());
    assert_eq!(
        (&replayed.ledger, &replayed.damage[..]),
        (journal.ledger(), &[][..])
    );
    for file in 1..=files / 2 {
        journal
            .append_end(&Record::FileIdEnd { file })
            .expect("an end fits");
    }
    journal
        .append(&bind(files + 1))
        .expect("there is room again");
    let ledger = journal.ledger().clone();
    drop(journal);
    let (journal, replayed) = Journal::open(medium.clone());
    assert_eq!((journal.ledger(), &replayed.ledger), (&ledger, &ledger));
}
