//! Files that are made in a transaction and removed before its end take no space and leave no entries in its tables.

use crate::common;

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;

use common::Verbs;
use firn_backing::{Access, Backing, Errno, Files, Names, RenameFlags, Volume};
use firn_sim::{SimBacking, suite};
use firn_transact::{Mode, Object, TransactionalBacking};

const MODES: [Mode; 2] = [Mode::Buffer, Mode::Shadow];
const BYTES: usize = 64 << 10;
/// Space for a few files at once, which is much less than for all files that are made.
const CAPACITY: u64 = 16 * BYTES as u64;
const ROUNDS: usize = 200;

type SimInode = Arc<Object<SimBacking>>;

/// Begins a transaction in which one file was made and removed, so that the state of the top directory is saved
/// already.
fn begun(mode: Mode) -> TransactionalBacking<SimBacking> {
    let sim = SimBacking::new();
    write(&sim, &sim.root(), "old");
    sim.set_capacity(Some(CAPACITY));
    let backing = TransactionalBacking::open(sim)
        .expect("open")
        .0
        .in_mode(mode);
    backing.begin(&backing.root(), b"").expect("begin");
    write(&backing, &backing.root(), "first");
    backing
        .unlink(&backing.root(), OsStr::new("first"))
        .expect("unlink");
    backing
}

fn write<B: Backing>(b: &B, dir: &B::Inode, name: &str) -> (B::Inode, B::File) {
    let (inode, file, _) = b
        .create(&suite::own_caller(), dir, OsStr::new(name), 0o644)
        .expect("create");
    assert_eq!(
        b.write_at(&file, &[IoSlice::new(&[7; BYTES])], 0),
        Ok(BYTES)
    );
    (inode, file)
}

fn first_byte<B: Backing>(b: &B, file: &B::File) -> Result<(usize, u8), Errno> {
    let mut byte = [0];
    b.read_at(file, &mut byte, 0).map(|count| (count, byte[0]))
}

fn bytes_free(backing: &TransactionalBacking<SimBacking>) -> u64 {
    let stat = backing.base().statfs().expect("statfs");
    stat.blocks_free * stat.block_size
}

/// Returns the number of objects that the open transaction changes, and the number of names that have a state in it.
fn noted(backing: &TransactionalBacking<SimBacking>) -> (u64, u64) {
    let open = &backing.transactions()[0];
    (open.objects, open.states.values().sum())
}

#[test]
fn regression_files_that_are_made_and_removed_take_no_room() {
    for mode in MODES {
        let backing = begun(mode);
        let root = backing.root();
        let before = bytes_free(&backing);
        let after_one = noted(&backing);
        for round in 0..ROUNDS {
            let name = round.to_string();
            write(&backing, &root, &name);
            backing.unlink(&root, OsStr::new(&name)).expect("unlink");
        }
        assert_eq!(noted(&backing), after_one, "{mode:?}");
        assert_eq!(bytes_free(&backing), before, "{mode:?}");
        backing.commit(&root, 1).expect("commit");
        backing.base().fsck().expect("fsck");
    }
}

#[test]
fn regression_files_that_are_renamed_over_take_no_room() {
    for mode in MODES {
        let backing = begun(mode);
        let root = backing.root();
        let mut after_one = (0, 0);
        for round in 0..ROUNDS {
            let temporary = format!("new{round}");
            write(&backing, &root, &temporary);
            let flags = RenameFlags::empty();
            backing
                .rename(
                    &root,
                    OsStr::new(&temporary),
                    &root,
                    OsStr::new("state"),
                    flags,
                )
                .expect("rename");
            if round == 0 {
                after_one = noted(&backing);
            }
        }
        assert_eq!(noted(&backing), after_one, "{mode:?}");
        backing.commit(&root, 1).expect("commit");
        let (inode, attr) = backing
            .base()
            .lookup(&backing.base().root(), OsStr::new("state"))
            .expect("lookup");
        assert_eq!((attr.size, attr.nlink), (BYTES as u64, 1));
        assert!(backing.base().open(&inode, Access::Read).is_ok());
        backing.base().fsck().expect("fsck");
    }
}

#[test]
fn regression_directories_that_are_made_and_removed_take_no_room() {
    for mode in MODES {
        let backing = begun(mode);
        let root = backing.root();
        let before = bytes_free(&backing);
        let after_one = noted(&backing);
        for round in 0..ROUNDS {
            let name = round.to_string();
            let (dir, _) = backing
                .mkdir(&suite::own_caller(), &root, OsStr::new(&name), 0o755)
                .expect("mkdir");
            for file in ["a", "b"] {
                write(&backing, &dir, file);
                backing.unlink(&dir, OsStr::new(file)).expect("unlink");
            }
            backing.rmdir(&root, OsStr::new(&name)).expect("rmdir");
        }
        assert_eq!(noted(&backing), after_one, "{mode:?}");
        assert_eq!(bytes_free(&backing), before, "{mode:?}");
        backing.abort(&root).expect("abort");
        backing.base().fsck().expect("fsck");
    }
}

/// Proves S-tx-13.
#[test]
fn a_file_that_was_made_and_removed_lives_until_its_last_close() {
    for (mode, is_aborted) in MODES
        .into_iter()
        .flat_map(|mode| [(mode, false), (mode, true)])
    {
        let backing = begun(mode);
        let root = backing.root();
        let (inode, file) = write(&backing, &root, "made");
        backing.unlink(&root, OsStr::new("made")).expect("unlink");
        let linked = backing.link(&inode, &root, OsStr::new("again"));
        assert_eq!(
            linked.err(),
            Some(Errno::NOENT),
            "{mode:?}: it comes back by no other name"
        );
        let works = |what: &str| {
            assert_eq!(
                backing.attr(&inode).map(|attr| attr.nlink),
                Ok(0),
                "{mode:?}: {what}"
            );
            assert_eq!(
                backing.write_at(&file, &[IoSlice::new(b"x")], 0),
                Ok(1),
                "{mode:?}: {what}"
            );
            assert_eq!(
                first_byte(&backing, &file),
                Ok((1, b'x')),
                "{mode:?}: {what}"
            );
            backing.set_mode(&inode, 0o600).expect("chmod");
            backing.set_len(&file, BYTES as u64 / 2).expect("truncate");
            backing.sync(&file, false).expect("fsync");
        };
        works("in the transaction");
        if is_aborted {
            backing.abort(&root).expect("abort");
        } else {
            backing.prepare(&root, 1).expect("prepare");
            works("waits for no outcome");
            backing.commit(&root, 1).expect("commit");
        }
        works("after the transaction");
        let while_open = bytes_free(&backing);
        drop((inode, file));
        let freed = bytes_free(&backing) - while_open;
        assert_eq!(
            freed,
            BYTES as u64 / 2,
            "{mode:?}: gone with the last close"
        );
        backing.base().fsck().expect("fsck");
    }
}

#[test]
fn nothing_is_made_in_a_directory_that_was_made_and_removed() {
    for mode in MODES {
        let backing = begun(mode);
        let root = backing.root();
        let (dir, _) = backing
            .mkdir(&suite::own_caller(), &root, OsStr::new("dir"), 0o755)
            .expect("mkdir");
        backing.rmdir(&root, OsStr::new("dir")).expect("rmdir");
        let name = OsStr::new("x");
        let made = backing
            .create(&suite::own_caller(), &dir, name, 0o644)
            .err();
        assert_eq!(made, Some(Errno::NOENT), "{mode:?}");
        assert_eq!(
            backing.lookup(&dir, name).err(),
            Some(Errno::NOENT),
            "{mode:?}"
        );
        assert_eq!(backing.attr(&dir).map(|attr| attr.nlink), Ok(0), "{mode:?}");
        let moved = backing.rename(&root, OsStr::new("old"), &dir, name, RenameFlags::empty());
        assert_eq!(moved, Err(Errno::NOENT), "{mode:?}");
        backing.abort(&root).expect("abort");
    }
}

#[test]
fn what_was_there_and_is_removed_comes_back_with_an_abort() {
    for mode in MODES {
        let backing = begun(mode);
        let root: SimInode = backing.root();
        let flags = RenameFlags::empty();
        for round in 0..3 {
            let (_, file) = write(&backing, &root, "temporary");
            drop(file);
            backing
                .rename(
                    &root,
                    OsStr::new("temporary"),
                    &root,
                    OsStr::new("old"),
                    flags,
                )
                .expect("rename");
            if round == 1 {
                backing.unlink(&root, OsStr::new("old")).expect("unlink");
            }
        }
        assert_eq!(
            backing
                .lookup(&root, OsStr::new("old"))
                .map(|(_, attr)| attr.nlink),
            Ok(1)
        );
        backing.abort(&root).expect("abort");
        let (inode, attr) = backing
            .lookup(&root, OsStr::new("old"))
            .expect("it is back");
        assert_eq!((attr.size, attr.nlink), (BYTES as u64, 1), "{mode:?}");
        let file = backing.open(&inode, Access::Read).expect("open");
        assert_eq!(first_byte(&backing, &file), Ok((1, 7)), "{mode:?}");
        assert_eq!(
            backing.lookup(&root, OsStr::new("temporary")).err(),
            Some(Errno::NOENT),
            "{mode:?}"
        );
    }
}
