//! Every sequence of calls on three names. After a commit the tree is as on a plain directory, after an abort as
//! before. The CprFS state of each name agrees with its file.

use crate::common;

use std::ffi::OsStr;
use std::io::IoSlice;

use common::Verbs;
use firn_backing::{Access, Backing, Errno, RenameFlags, Volume};
use firn_sim::{SimBacking, suite};
use firn_sim::{Tree, tree};
use firn_transact::{Mode, TransactionalBacking};

use crate::oracle;

use firn_transact::state::NameState;
use oracle::Book;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Create(usize),
    Write(usize),
    Truncate(usize),
    Unlink(usize),
    Rename(usize, usize),
    Link(usize, usize),
    Exchange(usize, usize),
}

const NAMES: [&str; 3] = ["a", "b", "c"];

fn pairs() -> impl Iterator<Item = (usize, usize)> {
    (0..3)
        .flat_map(|a| (0..3).map(move |b| (a, b)))
        .filter(|(a, b)| a != b)
}

/// Returns the calls that the paper covers.
fn of_files() -> Vec<Call> {
    let one = [
        Call::Create as fn(usize) -> Call,
        Call::Write,
        Call::Truncate,
        Call::Unlink,
    ];
    let ones = one.into_iter().flat_map(|call| (0..3).map(call));
    ones.chain(pairs().map(|(a, b)| Call::Rename(a, b)))
        .collect()
}

/// Returns these calls and those that the paper does not cover.
fn of_links() -> Vec<Call> {
    let exchanges = pairs()
        .filter(|(a, b)| a < b)
        .map(|(a, b)| Call::Exchange(a, b));
    let links = pairs().map(|(a, b)| Call::Link(a, b));
    of_files()
        .into_iter()
        .chain(exchanges)
        .chain(links)
        .collect()
}

fn run<B: Backing>(b: &B, call: Call, step: u8) -> Result<(), Errno> {
    let root = b.root();
    let name = |at: usize| OsStr::new(NAMES[at]);
    let open = |at| {
        b.lookup(&root, name(at))
            .and_then(|(inode, _)| b.open(&inode, Access::ReadWrite))
    };
    match call {
        Call::Create(at) => b
            .create(&suite::own_caller(), &root, name(at), 0o640)
            .map(drop),
        Call::Write(at) => b
            .write_at(&open(at)?, &[IoSlice::new(&[b'0' + step; 3])], 1)
            .map(drop),
        Call::Truncate(at) => b.set_len(&open(at)?, 2),
        Call::Unlink(at) => b.unlink(&root, name(at)),
        Call::Rename(from, to) => {
            b.rename(&root, name(from), &root, name(to), RenameFlags::empty())
        }
        Call::Exchange(from, to) => {
            b.rename(&root, name(from), &root, name(to), RenameFlags::EXCHANGE)
        }
        Call::Link(from, to) => {
            let (inode, _) = b.lookup(&root, name(from))?;
            b.link(&inode, &root, name(to)).map(drop)
        }
    }
}

fn ino<B: Backing>(b: &B, at: usize) -> Option<u64> {
    let found = b.lookup(&b.root(), OsStr::new(NAMES[at]));
    found.ok().map(|(_, attr)| attr.ino)
}

fn inos<B: Backing>(b: &B) -> [Option<u64>; 3] {
    [0, 1, 2].map(|at| ino(b, at))
}

fn are_one_file(plain: &SimBacking, call: Call) -> bool {
    let (Call::Rename(from, to) | Call::Exchange(from, to)) = call else {
        return false;
    };
    ino(plain, from).is_some() && ino(plain, from) == ino(plain, to)
}

/// Returns the state of a name, derived from the inodes of all names before and after, and from the truncated inodes.
fn state_by_inodes(
    at: usize,
    before: &[Option<u64>; 3],
    after: &[Option<u64>; 3],
    cut: &[u64],
) -> Option<NameState> {
    use NameState::*;
    let own = before[at];
    let is_moved = own.is_some() && (0..3).any(|other| after[other] == own && before[other] != own);
    let Some(file) = after[at] else {
        return own.map(|_| if is_moved { Dead } else { Deleted });
    };
    let is_cut = cut.contains(&file);
    let is_new = !before.contains(&Some(file));
    Some(match (own, is_new) {
        (Some(own), _) if own == file && is_cut => Truncated,
        (Some(own), _) if own == file => Normal,
        (None, true) => Normal,
        (Some(_), true) if is_moved => DeadReborn,
        (Some(_), true) => Reborn,
        (_, false) => match (is_moved, is_cut) {
            (false, false) => Renamed,
            (false, true) => RenamedTruncated,
            (true, false) => DeadRenamed,
            (true, true) => DeadRenamedTruncated,
        },
    })
}

/// Makes the transition of the paper for a call. A link counts as a create of the new name.
fn note(book: &mut Book, call: Call) {
    match call {
        Call::Create(at) | Call::Link(_, at) => book.create(NAMES[at]),
        Call::Write(_) => {}
        Call::Truncate(at) => book.truncate(NAMES[at]),
        Call::Unlink(at) => book.unlink(NAMES[at]),
        Call::Rename(from, to) => book.rename(NAMES[from], NAMES[to]),
        Call::Exchange(from, to) => book.exchange(NAMES[from], NAMES[to]),
    }
}

/// Returns a backing with these names, each with its own content.
fn fresh(names: &[usize], len: usize) -> SimBacking {
    let sim = SimBacking::new();
    for &at in names {
        let (_, file, _) = sim
            .create(
                &suite::own_caller(),
                &sim.root(),
                OsStr::new(NAMES[at]),
                0o644,
            )
            .expect("create");
        sim.write_at(&file, &[IoSlice::new(&[b'A' + at as u8; 6][..len])], 0)
            .expect("write");
    }
    sim
}

/// Runs all sequences of `len` calls, from a directory with the names `start`.
fn all(start: &[usize], calls: &[Call], len: u32) {
    // With one size a write only overwrites bytes, with the other it also extends the file.
    for (mode, size) in [(Mode::Buffer, 6), (Mode::Buffer, 3), (Mode::Shadow, 6)] {
        all_in(mode, fresh(start, size), calls, len);
    }
}

fn all_in(mode: Mode, disk: SimBacking, calls: &[Call], len: u32) {
    let before = disk.tree();
    let inos_before = inos(&disk);
    let mut count = 0;
    for (number, is_aborted) in (0..calls.len().pow(len)).flat_map(|n| [(n, false), (n, true)]) {
        let sequence: Vec<Call> = (0..len)
            .map(|at| calls[number / calls.len().pow(at) % calls.len()])
            .collect();
        let plain = disk.fork();
        let backing = TransactionalBacking::open(disk.fork())
            .expect("open")
            .0
            .in_mode(mode);
        backing.begin(&backing.root(), b"").expect("begin");
        let mut book = Book::default();
        let mut cut = Vec::new();
        for (step, &call) in sequence.iter().enumerate() {
            // A rename between two names of the same file does nothing.
            let changes_names = !are_one_file(&plain, call);
            let here = run(&backing, call, step as u8);
            let there = run(&plain, call, step as u8);
            assert_eq!(here, there, "{sequence:?}, call {step}");
            if here.is_ok() && changes_names {
                note(&mut book, call);
            }
            if let Call::Truncate(at) = call {
                cut.extend(ino(&plain, at));
            }
        }
        book.check();
        let inos_after = inos(&plain);
        for (at, name) in NAMES.into_iter().enumerate() {
            let is_there = inos_after[at].is_some();
            if let Some(state) = book.get(name) {
                assert_eq!(state.exists(), is_there, "{sequence:?}: {name} is {state}");
            }
            // In shadow mode there are no tables from which states could be derived.
            if mode == Mode::Buffer {
                let expected = state_by_inodes(at, &inos_before, &inos_after, &cut);
                let found = backing.scopes.state_of(&backing.root(), OsStr::new(name));
                // A file without changes has no state.
                let found =
                    found.or((expected == Some(NameState::Normal)).then_some(NameState::Normal));
                assert_eq!(found, expected, "{sequence:?}: {name}");
            }
        }
        let after = plain.tree();
        assert_eq!(
            tree(&backing),
            Ok(after.clone()),
            "{sequence:?}: as it is seen"
        );
        let below = backing.base().tree();
        match mode {
            // The backing does not have the changes.
            Mode::Buffer => {
                assert!(
                    before
                        .iter()
                        .all(|(path, entry)| path.is_empty() || below.get(path) == Some(entry))
                )
            }
            // The backing has all changes.
            Mode::Shadow => {
                let content = |tree: &Tree| -> Vec<_> {
                    let shown = tree.iter().filter(|(path, _)| !path.starts_with(b".firn"));
                    shown
                        .map(|(path, entry)| (path.clone(), entry.content.clone()))
                        .collect()
                };
                assert_eq!(
                    content(&below),
                    content(&after),
                    "{sequence:?}: in the backing"
                );
            }
        }
        if is_aborted {
            backing.abort(&backing.root()).expect("abort");
            assert_eq!(tree(&backing), Ok(before.clone()), "{sequence:?}: aborted");
        } else {
            backing.commit(&backing.root(), 1).expect("commit");
            assert_eq!(tree(&backing), Ok(after), "{sequence:?}: committed");
        }
        backing.base().fsck().expect("fsck");
        count += 1;
    }
    println!(
        "{mode:?}: {count} transactions: all sequences of {len} of {} calls, committed and aborted",
        calls.len()
    );
}

#[test]
fn every_sequence_of_four_calls_on_three_files() {
    all(&[0, 1, 2], &of_files(), 4);
}

#[test]
fn every_sequence_of_three_calls_where_a_name_is_free() {
    all(&[0, 1], &of_files(), 3);
    all(&[2], &of_files(), 3);
}

#[test]
fn every_sequence_of_three_calls_with_links_and_exchanges() {
    all(&[0, 1, 2], &of_links(), 3);
    all(&[0, 1], &of_links(), 3);
}

#[test]
fn a_name_that_a_directory_took_from_a_file_is_deleted() {
    let backing = TransactionalBacking::open(fresh(&[0, 1], 6))
        .expect("open")
        .0;
    let root = backing.root();
    backing.begin(&root, b"").expect("begin");
    let state = |at: usize| backing.scopes.state_of(&root, OsStr::new(NAMES[at]));
    for call in [Call::Unlink(0), Call::Rename(1, 2)] {
        run(&backing, call, 0).expect("call");
    }
    for at in [0, 1] {
        backing
            .mkdir(&suite::own_caller(), &root, OsStr::new(NAMES[at]), 0o755)
            .expect("mkdir");
    }
    assert_eq!(
        [0, 1, 2].map(state),
        [
            Some(NameState::Deleted),
            Some(NameState::Dead),
            Some(NameState::Renamed)
        ]
    );
}

#[test]
fn each_name_of_a_file_with_several_has_a_state_of_its_own() {
    let disk = fresh(&[0], 6);
    run(&disk, Call::Link(0, 1), 0).expect("link");
    for (removed, left) in [(0, 1), (1, 0)] {
        let backing = TransactionalBacking::open(disk.fork()).expect("open").0;
        let root = backing.root();
        backing.begin(&root, b"").expect("begin");
        run(&backing, Call::Truncate(left), 0).expect("truncate");
        run(&backing, Call::Unlink(removed), 0).expect("unlink");
        let state = |at: usize| backing.scopes.state_of(&root, OsStr::new(NAMES[at]));
        assert_eq!(
            (state(left), state(removed)),
            (Some(NameState::Truncated), Some(NameState::Deleted))
        );
        run(&backing, Call::Create(removed), 0).expect("create");
        assert_eq!(state(removed), Some(NameState::Reborn));
    }
}
