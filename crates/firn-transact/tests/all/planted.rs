//! Another program put files into a backing in the place of Firn's own files.

use std::ffi::OsStr;

use firn_backing::{Access, Backing, Caller, Files, Names, NewKind, Volume};
use firn_sim::SimBacking;
use firn_transact::change_log::{
    BytesSource, ChangeLog, DataChange, Entry, EntryName, EntrySide, Identity, WrittenRange,
};
use firn_transact::{OpenError, OwnError, StoreError, TransactionError, TransactionalBacking};

fn us() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn them() -> Caller {
    Caller {
        uid: us() + 1,
        gid: 0,
        pid: 0,
    }
}

fn ours() -> Caller {
    Caller {
        uid: us(),
        gid: 0,
        pid: 0,
    }
}

fn name(text: &str) -> &OsStr {
    OsStr::new(text)
}

/// Puts a decided change log into the backing that would overwrite the file `victim`. `modes` are the modes of `.firn`,
/// the directory of the transaction, and the log.
fn plant(disk: &SimBacking, caller: Caller, modes: [u32; 3]) {
    let root = disk.root();
    let (_, file, attr) = disk
        .create(&ours(), &root, name("victim"), 0o600)
        .expect("create");
    disk.write_at(&file, &[std::io::IoSlice::new(b"before")], 0)
        .expect("write");
    let data = DataChange {
        cut: 6,
        size: 6,
        written: vec![WrittenRange {
            start: 0,
            end: 6,
            source: BytesSource::Inline(b"FORGED".to_vec()),
        }],
        grows: false,
    };
    let identity = Identity {
        ino: attr.ino,
        elsewhere: false,
    };
    let entry = Entry {
        unchanged_name: Some(EntryName::new(0, b"victim")),
        redo: EntrySide {
            data: Some(data),
            ..EntrySide::default()
        },
        ..Entry::new(1, identity, false)
    };
    let log = ChangeLog {
        id: 1,
        entries: vec![entry],
        ..ChangeLog::default()
    };
    let firn = disk
        .mkdir(&caller, &root, name(".firn"), modes[0])
        .expect("mkdir")
        .0;
    let dir = disk
        .mkdir(&caller, &firn, name("tx-1"), modes[1])
        .expect("mkdir")
        .0;
    let (_, file, _) = disk
        .create(&caller, &dir, name("commit"), modes[2])
        .expect("create");
    disk.write_at(&file, &[std::io::IoSlice::new(&log.encode())], 0)
        .expect("write");
}

fn victim(disk: &SimBacking) -> Vec<u8> {
    let (inode, attr) = disk.lookup(&disk.root(), name("victim")).expect("lookup");
    let mut bytes = vec![0; attr.size as usize];
    disk.read_at(
        &disk.open(&inode, Access::Read).expect("open"),
        &mut bytes,
        0,
    )
    .expect("read");
    bytes
}

#[test]
fn a_record_of_the_same_user_is_applied() {
    let disk = SimBacking::new();
    plant(&disk, ours(), [0o700, 0o700, 0o600]);
    assert_eq!(TransactionalBacking::has_transactions(&disk), Ok(true));
    let (_, outcome) = TransactionalBacking::open(disk.clone()).expect("open");
    assert_eq!(outcome.finished, [1]);
    assert_eq!(victim(&disk), b"FORGED");
}

/// Proves S-priv-7, S-priv-10.
#[test]
fn regression_a_planted_record_is_named_and_not_applied() {
    let open_to_others = [
        [0o755, 0o700, 0o600],
        [0o700, 0o755, 0o600],
        [0o700, 0o700, 0o644],
    ];
    let planted = [(them(), [0o700, 0o700, 0o600])].into_iter();
    for (caller, modes) in planted.chain(open_to_others.map(|modes| (ours(), modes))) {
        let disk = SimBacking::new();
        plant(&disk, caller, modes);
        let before = disk.tree();
        let error = TransactionalBacking::open(disk.clone())
            .err()
            .expect("refused");
        assert!(
            matches!(
                error,
                OpenError::Store(StoreError::Own(OwnError::Distrusted { .. }))
            ),
            "{modes:?}: {error}"
        );
        assert!(error.to_string().contains(".firn"), "{error}");
        assert_eq!(disk.tree(), before, "{modes:?}");
    }
}

#[test]
fn regression_a_directory_of_another_owner_below_ours_is_refused() {
    let disk = SimBacking::new();
    plant(&disk, ours(), [0o700, 0o700, 0o600]);
    let (firn, _) = disk.lookup(&disk.root(), name(".firn")).expect("lookup");
    let (dir, _) = disk.lookup(&firn, name("tx-1")).expect("lookup");
    let (file, _) = disk.lookup(&dir, name("commit")).expect("lookup");
    for inode in [&dir, &file] {
        disk.set_owner(inode, Some(them().uid), None)
            .expect("chown");
        let told = TransactionalBacking::open(disk.fork())
            .err()
            .expect("refused")
            .to_string();
        assert!(
            told.contains(".firn/tx-1") && told.contains("belongs to user"),
            "{told}"
        );
        disk.set_owner(inode, Some(us()), None).expect("chown");
    }
    assert!(TransactionalBacking::open(disk.fork()).is_ok());
}

/// Proves S-priv-7, S-priv-10.
#[test]
fn regression_what_is_no_directory_is_named_in_every_mode() {
    for (kind, words) in [
        (libc::S_IFREG, "a regular file"),
        (libc::S_IFLNK, "a symbolic link"),
        (libc::S_IFIFO, "a named pipe"),
        (libc::S_IFSOCK, "a socket"),
        (libc::S_IFBLK, "a block device"),
    ] {
        let disk = SimBacking::new();
        let root = disk.root();
        match kind {
            libc::S_IFLNK => drop(disk.symlink(&ours(), &root, name(".firn"), name("elsewhere"))),
            kind => {
                let node = NewKind::Node {
                    mode: kind | 0o600,
                    rdev: 0,
                };
                drop(disk.make(&ours(), &root, name(".firn"), node));
            }
        }
        let answers = [
            TransactionalBacking::has_transactions(&disk)
                .err()
                .map(TransactionError::from),
            TransactionalBacking::open(disk.fork())
                .err()
                .map(TransactionError::from),
            TransactionalBacking::known_backups(&disk, None)
                .err()
                .map(TransactionError::from),
        ];
        for error in answers {
            let told = error.expect("refused").to_string();
            assert!(
                told.contains(&format!(".firn is {words} instead of a directory")),
                "{told}"
            );
        }
    }
}

#[test]
fn regression_a_huge_file_takes_no_memory() {
    let disk = SimBacking::new();
    let firn = disk
        .mkdir(&ours(), &disk.root(), name(".firn"), 0o700)
        .expect("mkdir")
        .0;
    let dir = disk
        .mkdir(&ours(), &firn, name("tx-1"), 0o700)
        .expect("mkdir")
        .0;
    let (_, file, _) = disk
        .create(&ours(), &dir, name("open"), 0o600)
        .expect("create");
    disk.set_len(&file, 15 << 40).expect("sparse");
    let error = TransactionalBacking::open(disk).err().expect("refused");
    assert!(
        matches!(error, OpenError::Store(StoreError::Own(OwnError::TooLong { bytes, .. })) if bytes == 15 << 40),
        "{error}"
    );
}

/// Proves S-priv-11.
#[test]
fn regression_a_scope_that_leads_out_of_the_backing_is_refused() {
    for scope in ["..", "a/../..", "/etc", "a//b"] {
        let disk = SimBacking::new();
        let firn = disk
            .mkdir(&ours(), &disk.root(), name(".firn"), 0o700)
            .expect("mkdir")
            .0;
        let dir = disk
            .mkdir(&ours(), &firn, name("tx-1"), 0o700)
            .expect("mkdir")
            .0;
        let (_, file, _) = disk
            .create(&ours(), &dir, name("open"), 0o600)
            .expect("create");
        disk.write_at(&file, &[std::io::IoSlice::new(scope.as_bytes())], 0)
            .expect("write");
        let error = TransactionalBacking::open(disk).err().expect("refused");
        assert!(
            matches!(error, OpenError::Store(StoreError::Record { .. })),
            "{scope}: {error}"
        );
    }
}
