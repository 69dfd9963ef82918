//! Tests of the journal with random records.
//!
//! The bytes, cut anywhere, replay to a prefix of the appended records, and a snapshot does not change the ledger.

use firn_arena::journal::{Damage, Full, Journal, Ledger, Medium, Memory, PathState, replay};
use firn_format::record::{Ending, Identity, Record};
use proptest::prelude::*;

fn bind(file: u64, path: &str) -> Record {
    let identity = Identity {
        dev: 1,
        ino: file,
        btime: None,
    };
    Record::FileIdBegin {
        file,
        identity,
        paths: vec![path.as_bytes().to_vec()],
        ending: Ending::Open,
    }
}

fn path(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

fn any_record() -> impl Strategy<Value = Record> {
    let name = prop::sample::select(vec!["a", "b", "a/x", "a/y", "b/x", "ab", "a/x/z"]);
    let from = name.clone();
    let to = name.clone();
    prop_oneof![
        (1u64..6, name.clone()).prop_map(|(file, p)| bind(file, p)),
        (1u64..6, name.clone()).prop_map(|(file, p)| Record::NameAdded {
            file,
            path: path(p)
        }),
        (1u64..6, name).prop_map(|(file, p)| Record::NameRemoved {
            file,
            path: path(p)
        }),
        (1u64..4, from, to, any::<bool>()).prop_map(|(id, from, to, exchange)| {
            Record::RenameBegin {
                id,
                from: path(from),
                to: path(to),
                exchange,
            }
        }),
        (1u64..4, any::<bool>()).prop_map(|(id, done)| Record::RenameEnd { id, done }),
        (1u64..6, 1u64..9, 0u64..100).prop_map(|(file, sequence, size)| Record::TruncateBegin {
            file,
            sequence,
            size
        }),
        (1u64..6, 1u64..9, 0u64..100, any::<bool>()).prop_map(|(file, sequence, size, done)| {
            Record::TruncateEnd {
                file,
                sequence,
                size,
                done,
            }
        }),
        (1u64..6, 1u64..9)
            .prop_map(|(file, sequence)| Record::DrainedRangesForgotten { file, sequence }),
        (1u64..6, 0u64..50, 1u64..50, 1u64..9).prop_map(|(file, offset, len, sequence)| {
            Record::DrainedRange {
                file,
                offset,
                len,
                sequence,
            }
        }),
        (1u64..6, any::<i64>(), any::<u64>()).prop_map(|(file, sec, written)| Record::ModifiedAt {
            file,
            time: (sec, 0),
            written
        }),
        (
            1u64..6,
            prop_oneof![Just(Ending::Open), Just(Ending::Closed), Just(Ending::Cut)]
        )
            .prop_map(|(file, ending)| Record::Ended { file, ending }),
        (1u64..6).prop_map(|file| Record::FileIdEnd { file }),
    ]
}

/// A medium that keeps a copy of its bytes after each store, and after the first half of each store.
struct Recorder {
    memory: Memory,
    copies: std::sync::Arc<std::sync::Mutex<Vec<Vec<u8>>>>,
}

impl Medium for Recorder {
    fn len(&self) -> usize {
        self.memory.len()
    }
    fn write(&mut self, at: usize, bytes: &[u8]) {
        // A crash can tear a store, unless it is one word.
        if bytes.len() != 8 {
            self.memory.write(at, &bytes[..bytes.len() / 2]);
        }
        self.copies.lock().unwrap().push(self.memory.0.clone());
        self.memory.write(at, bytes);
        self.copies.lock().unwrap().push(self.memory.0.clone());
    }
    fn read(&self, at: usize, bytes: &mut [u8]) {
        self.memory.read(at, bytes);
    }
    fn reserve(&mut self, at: usize, len: usize) -> bool {
        self.memory.reserve(at, len)
    }
    fn release(&mut self, at: usize, len: usize) {
        self.memory.release(at, len);
    }
    fn data_len(&self, at: usize, len: usize) -> usize {
        self.memory.data_len(at, len)
    }
}

proptest! {
    /// A crash after, or in the middle of, any store leaves the ledger before or after the append.
    #[test]
    fn a_crash_at_any_store_replays_to_before_or_after(records in prop::collection::vec(any_record(), 1..40)) {
        let copies = std::sync::Arc::default();
        let memory = Memory(vec![0; 2 * 1024]);
        let mut journal = Journal::create(Recorder { memory, copies: std::sync::Arc::clone(&copies) });
        let mut before = Ledger::default();
        for record in records {
            copies.lock().unwrap().clear();
            let result = journal.append(&record);
            let mut expected = before.clone();
            if result.is_ok() {
                expected.apply(&record);
            }
            prop_assert_eq!(journal.ledger(), &expected);
            for bytes in copies.lock().unwrap().drain(..) {
                let replayed = replay(&Memory(bytes));
                prop_assert!(replayed.ledger == before || replayed.ledger == expected, "{record:?}: replayed {:?}\nbefore {before:?}\nafter {expected:?}", replayed.ledger);
                prop_assert_eq!(&replayed.damage, &vec![]);
            }
            before = expected;
        }
    }

    /// Any flipped bit is either found, or it lies where nothing is stored.
    #[test]
    fn a_flipped_bit_is_found_or_harmless(records in prop::collection::vec(any_record(), 5..20), bit in 0usize..8 * 1024) {
        let mut journal = Journal::create(Memory(vec![0; 2 * 1024]));
        let mut prefixes = vec![Ledger::default()];
        for record in &records {
            let _ = journal.append(record);
            prefixes.push(journal.ledger().clone());
        }
        let mut bytes = journal.into_medium().0;
        bytes[bit / 8] ^= 1 << (bit % 8);
        let replayed = replay(&Memory(bytes.clone()));
        let (again, _) = Journal::open(Memory(bytes));
        prop_assert_eq!(again.ledger(), &replayed.ledger);
        // The last record has none after it: its damage looks like a torn tail and is dropped.
        if replayed.damage.is_empty() {
            prop_assert!(prefixes.iter().rev().take(2).any(|p| *p == replayed.ledger));
        }
    }
}

/// Proves S-crash-8.
#[test]
fn a_torn_tail_is_dropped_and_damage_in_the_middle_is_named() {
    let mut journal = Journal::create(Memory(vec![0; 4096]));
    for file in 1..=3 {
        journal.append(&bind(file, "file")).unwrap();
    }
    let bytes = journal.into_medium().0;
    let ends: Vec<usize> = (0..3).map(|n| 24 + n * 64).collect();
    let mut torn = bytes.clone();
    torn[ends[2] + 20] ^= 1;
    let replayed = replay(&Memory(torn));
    assert_eq!((replayed.ledger.len(), replayed.damage.len()), (2, 0));
    let mut holed = bytes;
    holed[ends[1] + 20] ^= 1;
    let replayed = replay(&Memory(holed));
    assert_eq!(replayed.ledger.len(), 2);
    assert!(
        matches!(replayed.damage[..], [Damage::Hole { half: 0, .. }]),
        "{:?}",
        replayed.damage
    );
}

#[test]
fn a_journal_without_a_header_is_damaged_not_empty() {
    let replayed = replay(&Memory(vec![0; 4096]));
    assert_eq!(replayed.damage, [Damage::NoHalf]);
}

#[test]
fn the_first_half_is_read_without_its_header() {
    let mut journal = Journal::create(Memory(vec![0; 4096]));
    journal.append(&bind(1, "file")).unwrap();
    let mut bytes = journal.into_medium().0;
    bytes[3] ^= 1;
    let (journal, replayed) = Journal::open(Memory(bytes));
    assert_eq!(
        (replayed.ledger.len(), &replayed.damage[..]),
        (1, &[Damage::Header { half: 0 }][..])
    );
    let again = replay(&journal.into_medium());
    assert_eq!((again.ledger.len(), again.damage.len()), (1, 0));
}

#[test]
fn regression_frames_of_a_half_that_was_passed_over_stay_away() {
    let journal = Journal::create(Memory(vec![0; 4096]));
    let (mut journal, _) = Journal::open(journal.into_medium());
    for file in 1..=3 {
        journal.append(&bind(file, "file")).unwrap();
    }
    let bytes = journal.into_medium().0;
    let mut header_and_frame = bytes.clone();
    header_and_frame[2048] ^= 1;
    header_and_frame[2048 + 24 + 20] ^= 1;
    let replayed = replay(&Memory(header_and_frame));
    assert_eq!(
        (replayed.ledger.len(), replayed.damage.len()),
        (2, 2),
        "{:?}",
        replayed.damage
    );
    // Without a magic the second half looks like a snapshot that was not finished: the first one,
    // which is empty, is the journal.
    let mut no_magic = bytes;
    no_magic[2048..2056].fill(0);
    let (journal, replayed) = Journal::open(Memory(no_magic));
    assert_eq!(replayed.ledger.len(), 0);
    let again = replay(&journal.into_medium());
    assert_eq!((again.ledger.len(), &again.damage[..]), (0, &[][..]));
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let mut journal = Journal::create(Memory(vec![0; 2 * 256]));
    let mut known = 0;
    while journal.append(&bind(known + 1, "some/path")).is_ok() {
        known += 1;
    }
    let ledger = journal.ledger().clone();
    assert_eq!(journal.append(&bind(99, "some/path")), Err(Full));
    assert_eq!(journal.ledger(), &ledger);
    journal.append_end(&Record::FileIdEnd { file: 1 }).unwrap();
    journal.append(&bind(99, "some/path")).unwrap();
}

/// A medium that counts the headers that are written, one for each snapshot.
struct Counter {
    memory: Memory,
    headers: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

impl Medium for Counter {
    fn len(&self) -> usize {
        self.memory.len()
    }
    fn write(&mut self, at: usize, bytes: &[u8]) {
        let is_magic = at.is_multiple_of(self.len() / 2) && bytes.len() == 8;
        self.headers
            .fetch_add(usize::from(is_magic), std::sync::atomic::Ordering::Relaxed);
        self.memory.write(at, bytes);
    }
    fn read(&self, at: usize, bytes: &mut [u8]) {
        self.memory.read(at, bytes);
    }
    fn reserve(&mut self, at: usize, len: usize) -> bool {
        self.memory.reserve(at, len)
    }
    fn release(&mut self, at: usize, len: usize) {
        self.memory.release(at, len);
    }
    fn data_len(&self, at: usize, len: usize) -> usize {
        self.memory.data_len(at, len)
    }
}

#[test]
fn regression_a_nearly_full_journal_does_not_write_all_of_itself_for_each_file() {
    let headers = std::sync::Arc::default();
    let memory = Memory(vec![0; 2 * (256 << 10)]);
    let mut journal = Journal::create(Counter {
        memory,
        headers: std::sync::Arc::clone(&headers),
    });
    let closed = |file| Record::Ended {
        file,
        ending: firn_format::record::Ending::Closed,
    };
    let mut files = 0;
    while journal.append(&bind(files + 1, "some/path")).is_ok() {
        files += 1;
        journal
            .append_end(&closed(files))
            .expect("room is kept for it");
    }
    assert!(files > 1000, "{files} files");
    for _ in 0..1000 {
        assert_eq!(journal.append(&bind(files + 1, "some/path")), Err(Full));
    }
    let count = || headers.load(std::sync::atomic::Ordering::Relaxed);
    assert!(count() <= 4, "{} snapshots", count());
    // In each round, one file id ends and one begins.
    let mut refused = 0;
    for first in 1..=10_000 {
        journal
            .append_end(&Record::FileIdEnd { file: first })
            .expect("an end");
        match journal.append(&bind(files + 1, "some/path")) {
            Ok(()) => {
                files += 1;
                journal
                    .append_end(&closed(files))
                    .expect("room is kept for it");
            }
            Err(Full) => refused += 1,
        }
    }
    assert!(
        refused < 100,
        "{refused} files were refused though as many had gone"
    );
    assert!(count() < 1000, "{} snapshots", count());
}

#[test]
fn regression_ranges_that_passed_make_room() {
    let mut journal = Journal::create(Memory(vec![0; 2 * (64 << 10)]));
    journal.append(&bind(1, "some/path")).unwrap();
    let mut sequence = 0;
    while journal
        .append(&Record::DrainedRange {
            file: 1,
            offset: sequence,
            len: 1,
            sequence,
        })
        .is_ok()
    {
        sequence += 1;
    }
    journal
        .append_end(&Record::DrainedRangesForgotten { file: 1, sequence })
        .unwrap();
    journal.append(&bind(2, "other/path")).unwrap();
}

/// When the ledger stored the names that each rename might produce, they doubled with each rename, until none could
/// end.
#[test]
fn regression_renames_add_no_names() {
    let mut ledger = Ledger::default();
    ledger.apply(&bind(1, "a/x"));
    // This name is doubtful from here on.
    ledger.apply(&Record::NameAdded {
        file: 1,
        path: path("b/x"),
    });
    ledger.apply(&Record::NameRemoved {
        file: 1,
        path: path("b/x"),
    });
    for round in 0..100 {
        for (id, (from, to)) in [("a", "c/x"), ("b", "a"), ("c/x", "b")].iter().enumerate() {
            let exchange = round % 3 == 0;
            let (id, from, to) = (id as u64, path(from), path(to));
            ledger.apply(&Record::RenameBegin {
                id,
                from,
                to,
                exchange,
            });
            let done = round % 2 == 0;
            ledger.apply(&Record::RenameEnd { id, done });
        }
        let paths = &ledger.file(1).expect("it is known").paths;
        assert!(paths.len() <= 2, "{paths:?}");
    }
}

#[test]
fn a_rename_that_was_left_and_one_after_it_leave_every_name_that_is_possible() {
    let mut ledger = Ledger::default();
    ledger.apply(&bind(1, "a/x"));
    for (id, from, to) in [(1, "a", "b"), (2, "b", "c")] {
        let (from, to) = (path(from), path(to));
        ledger.apply(&Record::RenameBegin {
            id,
            from,
            to,
            exchange: false,
        });
    }
    let possible = |ledger: &Ledger| {
        let paths = ledger.possible_paths(ledger.file(1).expect("it is known"));
        let names = paths
            .iter()
            .map(|(path, _)| String::from_utf8_lossy(path).into_owned());
        names.collect::<Vec<_>>()
    };
    assert_eq!(possible(&ledger), ["a/x", "b/x", "c/x"]);
    ledger.apply(&Record::RenameEnd { id: 2, done: true });
    assert_eq!(possible(&ledger), ["a/x", "c/x"]);
    ledger.settle_all_renames();
    assert_eq!(possible(&ledger), ["a/x", "c/x"]);
}

#[test]
fn names_follow_the_rename_of_a_directory_above() {
    let mut ledger = Ledger::default();
    ledger.apply(&bind(1, "a/x"));
    ledger.apply(&bind(2, "ab"));
    let rename = Record::RenameBegin {
        id: 1,
        from: path("a"),
        to: path("b"),
        exchange: false,
    };
    ledger.apply(&rename);
    let sure = |name: &str| (path(name).into(), PathState::Sure);
    let doubtful = (path("b/x").into(), PathState::Doubtful);
    let possible = ledger.possible_paths(ledger.file(1).unwrap());
    assert_eq!(possible[..], [sure("a/x"), doubtful]);
    ledger.apply(&Record::RenameEnd { id: 1, done: true });
    assert_eq!(ledger.file(1).unwrap().paths[..], [sure("b/x")]);
    assert_eq!(ledger.path(2), Some(&b"ab"[..]));
}

#[test]
fn a_failed_rename_leaves_the_old_name_and_an_exchange_swaps_both() {
    let mut ledger = Ledger::default();
    ledger.apply(&bind(1, "a"));
    ledger.apply(&bind(2, "b"));
    ledger.apply(&Record::RenameBegin {
        id: 1,
        from: path("a"),
        to: path("c"),
        exchange: false,
    });
    ledger.apply(&Record::RenameEnd { id: 1, done: false });
    assert_eq!(
        ledger.file(1).unwrap().paths[..],
        [(path("a").into(), PathState::Sure)]
    );
    ledger.apply(&Record::RenameBegin {
        id: 2,
        from: path("a"),
        to: path("b"),
        exchange: true,
    });
    ledger.apply(&Record::RenameEnd { id: 2, done: true });
    assert_eq!(ledger.path(1), Some(&b"b"[..]));
    assert_eq!(ledger.path(2), Some(&b"a"[..]));
}

/// Numbers that no firnd ever wrote, under checksums that are right.
#[test]
fn regression_the_last_generation_and_sequence_overflow_nothing() {
    use firn_format::journal::{encode_frame, encode_half_header};
    let mut half = encode_half_header(u64::MAX).to_vec();
    encode_frame(u64::MAX, 0, &bind(1, "a").encode(), &mut half);
    encode_frame(u64::MAX, u64::MAX, &bind(2, "b").encode(), &mut half);
    half.resize(4096, 0);
    let (mut journal, replayed) = Journal::open(Memory([half, vec![1; 4096]].concat()));
    assert_eq!(
        replayed
            .ledger
            .files()
            .map(|(file, _)| file)
            .collect::<Vec<_>>(),
        [1]
    );
    journal.append(&bind(3, "c")).unwrap();
    assert_eq!(replay(&journal.into_medium()).ledger.len(), 2);
}

#[test]
fn regression_a_file_with_names_in_both_of_two_exchanged_directories_keeps_both() {
    let mut journal = Journal::create(Memory(vec![0; 8192]));
    let identity = Identity {
        dev: 1,
        ino: 1,
        btime: None,
    };
    let paths = vec![path("a/x"), path("b/x")];
    journal
        .append(&Record::FileIdBegin {
            file: 1,
            identity,
            paths: paths.clone(),
            ending: Ending::Open,
        })
        .unwrap();
    let from = path("a");
    let to = path("b");
    journal
        .append(&Record::RenameBegin {
            id: 1,
            from,
            to,
            exchange: true,
        })
        .unwrap();
    journal
        .append(&Record::RenameEnd { id: 1, done: true })
        .unwrap();
    let mut names: Vec<_> = journal
        .ledger()
        .file(1)
        .unwrap()
        .paths
        .iter()
        .map(|(p, _)| p.to_vec())
        .collect();
    names.sort();
    assert_eq!(names, paths);
}
