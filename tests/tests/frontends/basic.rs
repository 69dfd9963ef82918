//! One program on one mount: data, names and attributes as on the backing itself.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_tests::command::copy_program;
use firn_tests::fsops::{Mapping, assert_same_bytes, close, open_rw, read, read_at};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, helper_binary, run, wait_until};
use rustix::fs::{
    CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, SeekFrom as Whence,
};
use rustix::io::Errno;
use rustix::mm::MapFlags;

const MIB: usize = 1 << 20;

#[test]
fn what_is_written_is_read_back_and_lies_in_the_backing_after_umount() {
    let sandbox = Sandbox::new("basic");
    let mount = FirnMount::new(&sandbox, SMALL);
    let mut expected = Vec::new();
    for (index, len) in [0, 1, 511, 4096, 4097, 65_536, MIB + 1, 5 * MIB]
        .into_iter()
        .enumerate()
    {
        let data = bytes(index as u64, len);
        fs::write(mount.join(format!("file{index}")), &data).expect("write");
        assert_same_bytes(
            "through the mount",
            &read(&mount.join(format!("file{index}"))),
            &data,
        );
        expected.push(data);
    }
    let backing = mount.umount();
    for (index, data) in expected.iter().enumerate() {
        assert_same_bytes(
            "in the backing",
            &read(&backing.join(format!("file{index}"))),
            data,
        );
    }
}

/// Proves S-write-12.
#[test]
fn a_program_that_runs_is_not_changed() {
    let sandbox = Sandbox::new("text-busy");
    let mount = FirnMount::new(&sandbox, SMALL);
    let program = mount.join("program");
    copy_program(Path::new("/bin/sleep"), &program);
    let before = read(&program);
    let child = Command::new(&program).arg("1000").spawn();
    let mut child = child.expect("start the program");

    for flags in [
        OFlags::WRONLY,
        OFlags::RDWR,
        OFlags::RDONLY | OFlags::TRUNC,
        OFlags::WRONLY | OFlags::TRUNC,
    ] {
        let opened = rustix::fs::open(&program, flags, Mode::empty());
        assert_eq!(opened.err(), Some(Errno::TXTBSY), "{flags:?}");
        assert_same_bytes("the program", &read(&program), &before);
    }
    let still_runs = child.try_wait().expect("waitpid").is_none();
    child.kill().expect("end the program");
    child.wait().expect("waitpid");
    assert!(still_runs, "the program died");
    assert_same_bytes("the program", &read(&program), &before);
    mount.umount();
}

/// Proves S-close-1.
#[test]
fn close_returned_means_the_file_is_in_the_backing() {
    let sandbox = Sandbox::new("close");
    let mount = FirnMount::new(&sandbox, &patient("close=drain"));
    let data = bytes(1, 3 * MIB + 17);
    let mut file = File::create(mount.join("file")).expect("create");
    file.write_all(&data).expect("write");
    close(file).expect("close");
    assert_same_bytes(
        "in the backing",
        &read(&mount.backing().join("file")),
        &data,
    );
    assert_eq!(mount.status().held_bytes, 0);
    mount.umount();
}

/// Proves S-close-2, S-fsync-5.
#[test]
fn close_held_returns_before_the_drain_and_wait_drains() {
    let sandbox = Sandbox::new("held");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let data = bytes(2, 100_000);
    fs::write(mount.join("file"), &data).expect("write");
    assert_eq!(mount.status().held_bytes, 100_000);
    assert_same_bytes("through the mount", &read(&mount.join("file")), &data);
    assert_eq!(
        fs::metadata(mount.join("file")).expect("stat").len(),
        100_000
    );
    mount.wait("durable", &mount.join("file")).ok();
    assert_same_bytes(
        "in the backing",
        &read(&mount.backing().join("file")),
        &data,
    );
    assert_eq!(mount.status().held_bytes, 0);
    mount.umount();
}

/// Proves S-close-2.
#[test]
fn held_data_drains_by_age_without_being_asked() {
    let sandbox = Sandbox::new("age");
    let mount = FirnMount::new(
        &sandbox,
        "arena-size=32M,chunk-size=4M,close=held,drain-age=100ms",
    );
    fs::write(mount.join("file"), bytes(3, 50_000)).expect("write");
    wait_until("drained by age", Duration::from_secs(20), || {
        mount.status().held_bytes == 0
    });
    assert_same_bytes(
        "in the backing",
        &read(&mount.backing().join("file")),
        &bytes(3, 50_000),
    );
    mount.umount();
}

/// Proves S-fsync-1.
#[test]
fn fsync_returned_means_the_bytes_are_in_the_backing() {
    let sandbox = Sandbox::new("fsync");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let mut file = File::create(mount.join("file")).expect("create");
    file.write_all(&bytes(4, 70_000)).expect("write");
    file.sync_all().expect("fsync");
    assert_same_bytes(
        "in the backing",
        &read(&mount.backing().join("file")),
        &bytes(4, 70_000),
    );
    file.write_all(b"more").expect("write");
    file.sync_data().expect("fdatasync");
    assert_eq!(
        fs::metadata(mount.backing().join("file"))
            .expect("stat")
            .len(),
        70_004
    );
    drop(file);
    mount.umount();
}

/// Proves S-write-2, S-attr-1.
#[test]
fn a_write_is_seen_by_every_other_descriptor_at_once() {
    let sandbox = Sandbox::new("visible");
    let mount = FirnMount::new(&sandbox, &patient(""));
    let writer = open_rw(&mount.join("file"));
    let reader = File::open(mount.join("file")).expect("open");
    for step in 0..40u64 {
        let data = bytes(step, 3000);
        writer.write_all_at(&data, step * 2500).expect("write");
        assert_same_bytes(
            "the other descriptor",
            &read_at(&reader, step * 2500, 3000),
            &data,
        );
        assert_eq!(reader.metadata().expect("stat").len(), step * 2500 + 3000);
    }
    drop((writer, reader));
    mount.umount();
}

/// Proves S-write-3, S-write-5, S-read-1.
#[test]
fn overwrites_holes_and_backward_writes_are_right_byte_for_byte() {
    let sandbox = Sandbox::new("overwrite");
    let mount = FirnMount::new(&sandbox, SMALL);
    let mut model = vec![0u8; 3 * MIB];
    let file = open_rw(&mount.join("file"));
    for step in 0..300u64 {
        let at = (step * 7_919_993) as usize % (2 * MIB);
        let data = bytes(step, 1 + (step as usize * 977) % 60_000);
        model[at..at + data.len()].copy_from_slice(&data);
        file.write_all_at(&data, at as u64).expect("write");
    }
    let len = file.metadata().expect("stat").len() as usize;
    model.truncate(len);
    assert_same_bytes("before the drain", &read_at(&file, 0, len), &model);
    drop(file);
    assert_same_bytes("after the drain", &read(&mount.join("file")), &model);
    let backing = mount.umount();
    assert_same_bytes("in the backing", &read(&backing.join("file")), &model);
}

/// Proves S-write-4.
#[test]
fn appends_of_several_processes_never_mix_or_vanish() {
    let sandbox = Sandbox::new("append");
    let mount = FirnMount::new(&sandbox, SMALL);
    let path = mount.join("log");
    let spawn = |id: u64| {
        let args = [
            "append",
            path.to_str().expect("UTF-8"),
            &id.to_string(),
            "2000",
        ]
        .map(String::from);
        Command::new(helper_binary())
            .args(args)
            .spawn()
            .expect("start an appender")
    };
    let children: Vec<_> = (1..=4).map(spawn).collect();
    for mut child in children {
        assert!(child.wait().expect("wait").success(), "an appender failed");
    }
    let text =
        String::from_utf8(read(&mount.umount().join("log"))).expect("whole records are text");
    let mut next = [0u64; 5];
    for line in text.lines() {
        let mut words = line
            .split_whitespace()
            .map(|word| word.parse::<u64>().expect("a number"));
        let id = words.next().expect("id");
        let number = words.next().expect("number");
        assert_eq!(
            next[id as usize], number,
            "records of writer {id} out of order"
        );
        assert_eq!(
            words.next(),
            Some(id * 1_000_003 + number),
            "a torn record: {line}"
        );
        next[id as usize] += 1;
    }
    assert_eq!(next, [0, 2000, 2000, 2000, 2000]);
}

/// Proves S-write-5, S-read-1.
#[test]
fn truncation_cuts_pending_data_and_growing_shows_zeros() {
    let sandbox = Sandbox::new("truncate");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let file = open_rw(&mount.join("file"));
    file.write_all_at(&bytes(5, 200_000), 0).expect("write");
    file.set_len(50_001).expect("shrink under pending data");
    file.set_len(120_000).expect("grow");
    file.write_all_at(b"end", 130_000).expect("write");
    let mut model = bytes(5, 200_000);
    model.truncate(50_001);
    model.resize(130_000, 0);
    model.extend_from_slice(b"end");
    assert_same_bytes("pending", &read_at(&file, 0, 1 << 20), &model);
    drop(file);
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(mount.join("file"))
        .expect("O_TRUNC");
    assert_eq!(fs::metadata(mount.join("file")).expect("stat").len(), 0);
    fs::write(mount.join("other"), &model).expect("write");
    fs::OpenOptions::new()
        .write(true)
        .open(mount.join("other"))
        .expect("open")
        .set_len(10)
        .expect("truncate");
    let backing = mount.umount();
    assert_eq!(read(&backing.join("file")), b"");
    assert_same_bytes(
        "in the backing",
        &read(&backing.join("other")),
        &model[..10],
    );
}

/// Proves S-mmap-1.
#[test]
fn shared_mappings_and_writes_see_each_other() {
    let sandbox = Sandbox::new("mmap");
    let mount = FirnMount::new(&sandbox, SMALL);
    let file = open_rw(&mount.join("file"));
    let mut model = bytes(6, 100_000);
    file.write_all_at(&model, 0).expect("write");
    let mapping = Mapping::new(&file, 100_000, MapFlags::SHARED).expect("mmap");
    assert_same_bytes("mapped", &mapping.read(0, 100_000), &model);

    let second = bytes(7, 30_000);
    file.write_all_at(&second, 20_000)
        .expect("write under the mapping");
    model[20_000..50_000].copy_from_slice(&second);
    assert_same_bytes("mapped after a write", &mapping.read(0, 100_000), &model);

    mapping.write(70_000, b"through the mapping");
    model[70_000..70_019].copy_from_slice(b"through the mapping");
    mapping.sync().expect("msync");
    assert_same_bytes(
        "read after a mapped store",
        &read_at(&file, 0, 100_000),
        &model,
    );

    let private = Mapping::new(&file, 100_000, MapFlags::PRIVATE).expect("mmap");
    private.write(0, b"mine alone");
    assert_same_bytes(
        "a private store stays private",
        &read_at(&file, 0, 100_000),
        &model,
    );
    drop((mapping, private, file));
    let backing = mount.umount();
    assert_same_bytes("in the backing", &read(&backing.join("file")), &model);
}

/// Proves S-mmap-2.
#[test]
fn a_mapped_store_without_msync_is_in_the_backing_after_umount() {
    let sandbox = Sandbox::new("mmapclose");
    let mount = FirnMount::new(&sandbox, SMALL);
    let file = open_rw(&mount.join("file"));
    file.set_len(40_000).expect("size");
    let mapping = Mapping::new(&file, 40_000, MapFlags::SHARED).expect("mmap");
    mapping.write(0, &bytes(8, 40_000));
    drop((mapping, file));
    let backing = mount.umount();
    assert_same_bytes(
        "in the backing",
        &read(&backing.join("file")),
        &bytes(8, 40_000),
    );
}

/// Proves S-read-2.
#[test]
fn sequential_reads_of_a_drained_file_in_any_request_size() {
    let sandbox = Sandbox::new("readahead");
    let data = bytes(9, 6 * MIB + 123);
    fs::write(sandbox.join("backing/file"), &data).expect("write in the backing");
    let mount = FirnMount::new(&sandbox, SMALL);
    for request in [1000, 4096, 128 * 1024, 3 * MIB] {
        let mut file = File::open(mount.join("file")).expect("open");
        let mut found = Vec::new();
        let mut buf = vec![0; request];
        loop {
            match file.read(&mut buf).expect("read") {
                0 => break,
                count => found.extend_from_slice(&buf[..count]),
            }
        }
        assert_same_bytes("read in pieces", &found, &data);
    }
    mount.umount();
}

/// Proves S-op-1.
#[test]
fn sparse_files_and_fallocate_modes_as_on_ext4() {
    let sandbox = Sandbox::new("sparse");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 200);
    let backing = image.mkdir("data");
    let mount = FirnMount::over(&sandbox, &backing, &patient(""));
    let file = open_rw(&mount.join("file"));
    file.write_all_at(&bytes(1, 8192), 1 << 20).expect("write");
    let seek = |whence| rustix::fs::seek(&file, whence);
    assert_eq!(seek(Whence::Data(0)), Ok(1 << 20));
    assert_eq!(seek(Whence::Hole(1 << 20)), Ok((1 << 20) + 8192));
    assert_eq!(seek(Whence::Data((1 << 20) + 8192)), Err(Errno::NXIO));

    let allocate = |flags, offset, len| rustix::fs::fallocate(&file, flags, offset, len);
    let keep = FallocateFlags::KEEP_SIZE;
    allocate(keep, 4 << 20, 65_536).expect("keep size");
    assert_eq!(file.metadata().expect("stat").len(), (1 << 20) + 8192);
    allocate(keep | FallocateFlags::PUNCH_HOLE, 1 << 20, 4096).expect("punch");
    let mut model = bytes(1, 8192);
    model[..4096].fill(0);
    assert_same_bytes("punched", &read_at(&file, 1 << 20, 8192), &model);
    allocate(FallocateFlags::ZERO_RANGE, (1 << 20) + 8000, 192).expect("zero");
    model[8000..].fill(0);
    assert_same_bytes("zeroed", &read_at(&file, 1 << 20, 8192), &model);
    // The kernel does not pass these two on to any FUSE file system (S-op-1).
    for mode in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        assert_eq!(allocate(mode, 0, 1 << 20), Err(Errno::OPNOTSUPP));
    }
    allocate(FallocateFlags::empty(), 0, 2 << 20).expect("plain");
    assert_eq!(file.metadata().expect("stat").len(), 2 << 20);
    assert!(file.metadata().expect("stat").blocks() >= (1 << 20) / 512);
    drop(file);
    mount.umount();
}

/// Proves S-op-1.
#[test]
fn copy_file_range_takes_pending_bytes_along() {
    let sandbox = Sandbox::new("copy");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let from = open_rw(&mount.join("from"));
    let to = open_rw(&mount.join("to"));
    from.write_all_at(&bytes(1, 300_000), 0).expect("write");
    to.write_all_at(&bytes(2, 50_000), 0).expect("write");
    let mut source = 100_000;
    let mut target = 10_000;
    while target < 110_000 {
        let left = 110_000 - target as usize;
        let copied =
            rustix::fs::copy_file_range(&from, Some(&mut source), &to, Some(&mut target), left);
        assert_ne!(copied.expect("copy_file_range"), 0);
    }
    let mut model = bytes(2, 50_000);
    model.truncate(10_000);
    model.extend_from_slice(&bytes(1, 300_000)[100_000..200_000]);
    assert_same_bytes("the copy", &read_at(&to, 0, 1 << 20), &model);
    drop((from, to));
    mount.umount();
}

/// Proves S-name-3.
#[test]
fn renameat2_flags_keep_and_exchange_names() {
    let sandbox = Sandbox::new("rename2");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let a = mount.join("a");
    let b = mount.join("b");
    fs::write(&a, "of a").expect("write");
    fs::write(&b, "of b").expect("write");
    let rename = |flags| rustix::fs::renameat_with(CWD, &a, CWD, &b, flags);
    assert_eq!(rename(RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename(RenameFlags::EXCHANGE).expect("exchange");
    assert_eq!((read(&a), read(&b)), (b"of b".to_vec(), b"of a".to_vec()));
    rename(RenameFlags::empty()).expect("replace");
    assert_eq!(read(&b), b"of b");
    let backing = mount.umount();
    assert_eq!(read(&backing.join("b")), b"of b");
    assert!(!backing.join("a").exists());
}

/// Proves S-name-2.
#[test]
fn hard_links_and_renames_never_split_pending_data() {
    let sandbox = Sandbox::new("links");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let first = open_rw(&mount.join("first"));
    first.write_all_at(b"0123456789", 0).expect("write");
    fs::hard_link(mount.join("first"), mount.join("second")).expect("link");
    let second = open_rw(&mount.join("second"));
    second
        .write_all_at(b"AB", 4)
        .expect("write through the other name");
    fs::rename(mount.join("first"), mount.join("third")).expect("rename");
    first.write_all_at(b"Z", 9).expect("write after the rename");
    for name in ["second", "third"] {
        assert_eq!(read(&mount.join(name)), b"0123AB678Z");
    }
    assert_eq!(fs::metadata(mount.join("third")).expect("stat").nlink(), 2);
    let numbers =
        ["second", "third"].map(|name| fs::metadata(mount.join(name)).expect("stat").ino());
    assert_eq!(numbers[0], numbers[1]);
    drop((first, second));
    let backing = mount.umount();
    assert_eq!(read(&backing.join("second")), b"0123AB678Z");
    assert_eq!(
        fs::metadata(backing.join("third")).expect("stat").nlink(),
        2
    );
}

/// Proves S-name-4.
#[test]
fn an_unlinked_open_file_lives_until_its_last_close() {
    let sandbox = Sandbox::new("unlinked");
    let mount = FirnMount::new(&sandbox, &patient(""));
    let file = open_rw(&mount.join("file"));
    file.write_all_at(&bytes(1, 9000), 0).expect("write");
    fs::remove_file(mount.join("file")).expect("unlink");
    file.write_all_at(&bytes(2, 9000), 9000)
        .expect("write without a name");
    assert_eq!(file.metadata().expect("fstat").nlink(), 0);
    assert_same_bytes("first half", &read_at(&file, 0, 9000), &bytes(1, 9000));
    assert_same_bytes("second half", &read_at(&file, 9000, 9000), &bytes(2, 9000));
    fs::write(mount.join("file"), "another").expect("a new file of that name");
    drop(file);
    assert_eq!(read(&mount.umount().join("file")), b"another");
}

/// Proves S-attr-5, S-op-1.
#[test]
fn extended_attributes_and_acls_pass_down() {
    let sandbox = Sandbox::new("acl");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 64);
    let backing = image.mkdir("data");
    let mount = FirnMount::over(&sandbox, &backing, &patient("allow-other"));
    let dir = mount.join("dir");
    fs::create_dir(&dir).expect("mkdir");
    let flags = rustix::fs::XattrFlags::CREATE;
    rustix::fs::setxattr(&dir, "user.colour", b"blue", flags).expect("setxattr");
    assert_eq!(
        rustix::fs::setxattr(&dir, "user.colour", b"red", flags),
        Err(Errno::EXIST)
    );
    assert_eq!(
        firn_tests::tree::xattrs(&backing.join("dir")).get(&b"user.colour"[..]),
        Some(&b"blue".to_vec())
    );

    run(Command::new("setfacl")
        .args(["-m", "u:nobody:rw,d:u:nobody:rw"])
        .arg(&dir))
    .ok();
    fs::write(dir.join("child"), "text").expect("a file under a default ACL");
    let acl = |path: &Path| {
        run(Command::new("getfacl").args(["-cE"]).arg(path))
            .ok()
            .stdout
    };
    assert!(
        acl(&dir).contains("default:user:nobody:rw-"),
        "{}",
        acl(&dir)
    );
    assert!(
        acl(&dir.join("child")).contains("user:nobody:rw-"),
        "{}",
        acl(&dir.join("child"))
    );
    assert_eq!(acl(&dir.join("child")), acl(&backing.join("dir/child")));
    mount.umount();
}

/// Proves S-attr-5, S-op-1.
#[test]
fn special_files_symlinks_and_modes_pass_down() {
    let sandbox = Sandbox::new("special");
    let mount = FirnMount::new(&sandbox, SMALL);
    let mode = Mode::from_raw_mode(0o640);
    let make = |name: &str, kind, device| {
        rustix::fs::mknodat(CWD, mount.join(name), kind, mode, device).expect("mknod");
        fs::symlink_metadata(mount.join(name)).expect("stat")
    };
    assert!(
        make("fifo", rustix::fs::FileType::Fifo, 0)
            .file_type()
            .is_fifo()
    );
    assert!(
        make("socket", rustix::fs::FileType::Socket, 0)
            .file_type()
            .is_socket()
    );
    let device = make(
        "device",
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::makedev(1, 3),
    );
    assert!(device.file_type().is_char_device());
    assert_eq!(device.rdev(), rustix::fs::makedev(1, 3));
    std::os::unix::fs::symlink("nowhere/at all", mount.join("link")).expect("symlink");
    assert_eq!(
        fs::read_link(mount.join("link")).expect("readlink"),
        Path::new("nowhere/at all")
    );
    fs::write(mount.join("script"), "#!/bin/sh\nexit 7\n").expect("write");
    fs::set_permissions(mount.join("script"), fs::Permissions::from_mode(0o755)).expect("chmod");
    run(&mut Command::new(mount.join("script"))).code(7);
    mount.umount();
}

/// Proves S-lock-1.
#[test]
fn locks_hold_between_processes() {
    let sandbox = Sandbox::new("locks");
    let mount = FirnMount::new(&sandbox, SMALL);
    let first = open_rw(&mount.join("file"));
    let second = open_rw(&mount.join("file"));
    rustix::fs::flock(&first, FlockOperation::LockExclusive).expect("flock");
    let attempt = rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(attempt, Err(Errno::WOULDBLOCK));
    rustix::fs::flock(&first, FlockOperation::Unlock).expect("unlock");
    rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive).expect("flock");

    let lock = rustix::fs::fcntl_lock;
    lock(&first, FlockOperation::NonBlockingLockExclusive).expect("fcntl lock");
    let script = "import fcntl,sys\nf=open(sys.argv[1],'r+')\ntry: fcntl.lockf(f,fcntl.LOCK_EX|fcntl.LOCK_NB)\n\
                  except BlockingIOError: sys.exit(9)";
    let contender = || {
        run(Command::new("python3")
            .args(["-c", script])
            .arg(mount.join("file")))
    };
    contender().code(9);
    lock(&first, FlockOperation::Unlock).expect("unlock");
    contender().ok();
    drop((first, second));
    mount.umount();
}

/// Proves S-op-1.
#[test]
fn statfs_shows_the_backing() {
    let sandbox = Sandbox::new("statfs");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 64);
    let mount = FirnMount::over(&sandbox, image.path(), SMALL);
    let through = rustix::fs::statvfs(mount.path());
    let native = rustix::fs::statvfs(image.path());
    let through = through.expect("statvfs");
    let native = native.expect("statvfs");
    let bytes = |s: &rustix::fs::StatVfs| (s.f_blocks * s.f_frsize, s.f_files, s.f_namemax);
    assert_eq!(bytes(&through), bytes(&native));
    mount.umount();
}

/// Proves S-op-4.
#[test]
fn o_tmpfile_gets_the_errno_that_programs_fall_back_from() {
    let sandbox = Sandbox::new("tmpfile");
    let mount = FirnMount::new(&sandbox, SMALL);
    let opened = rustix::fs::open(
        mount.path(),
        OFlags::TMPFILE | OFlags::RDWR,
        Mode::from_raw_mode(0o600),
    );
    assert_eq!(opened.err(), Some(Errno::OPNOTSUPP));
    mount.umount();
}

#[test]
fn a_directory_of_ten_thousand_names_lists_each_once() {
    let sandbox = Sandbox::new("names");
    let mount = FirnMount::new(&sandbox, SMALL);
    for index in 0..10_000 {
        let name = mount.join(format!("name-{index}"));
        rustix::fs::mknodat(
            CWD,
            name,
            rustix::fs::FileType::RegularFile,
            Mode::from_raw_mode(0o644),
            0,
        )
        .expect("mknod");
    }
    let mut names: Vec<_> = fs::read_dir(mount.path())
        .expect("readdir")
        .map(|e| e.expect("entry").file_name())
        .collect();
    assert_eq!(names.len(), 10_000);
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 10_000);
    for entry in fs::read_dir(mount.path()).expect("readdir").take(200) {
        fs::remove_file(entry.expect("entry").path()).expect("unlink while listing");
    }
    mount.umount();
}

#[test]
fn direct_io_and_plain_descriptors_agree() {
    let sandbox = Sandbox::new("direct");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 64);
    let mount = FirnMount::over(&sandbox, image.path(), SMALL);
    run(Command::new("dd")
        .args([
            "if=/dev/urandom",
            "bs=64k",
            "count=20",
            "oflag=direct",
            "status=none",
        ])
        .arg(format!("of={}", mount.join("file").display())))
    .ok();
    let plain = read(&mount.join("file"));
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(mount.join("file"));
    let mut found = Vec::new();
    let mut direct = direct.expect("open O_DIRECT");
    direct.seek(SeekFrom::Start(0)).expect("seek");
    // An unaligned buffer may be refused by the backing under O_DIRECT, so read as dd does.
    drop(direct);
    let copy = sandbox.join("copy");
    run(Command::new("dd")
        .args(["bs=64k", "iflag=direct", "status=none"])
        .arg(format!("if={}", mount.join("file").display()))
        .arg(format!("of={}", copy.display())))
    .ok();
    File::open(&copy)
        .expect("open")
        .read_to_end(&mut found)
        .expect("read");
    assert_same_bytes("direct", &found, &plain);
    mount.umount();
}

/// Proves S-share-3.
#[test]
fn a_change_made_in_the_backing_is_seen_after_the_attribute_timeout() {
    let sandbox = Sandbox::new("below");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},attr-timeout=0"));
    fs::write(mount.backing().join("file"), "one").expect("write below");
    assert_eq!(read(&mount.join("file")), b"one");
    fs::write(mount.backing().join("file"), "three").expect("write below");
    assert_eq!(read(&mount.join("file")), b"three");
    fs::remove_file(mount.backing().join("file")).expect("unlink below");
    assert_eq!(
        fs::metadata(mount.join("file"))
            .expect_err("gone")
            .raw_os_error(),
        Some(libc::ENOENT)
    );
    mount.umount();
}

/// Proves S-fsync-6.
#[test]
fn syncfs_returns_without_draining() {
    let sandbox = Sandbox::new("syncfs");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("file"), "text").expect("write");
    let dir = File::open(mount.path()).expect("open the root");
    rustix::fs::syncfs(dir.as_fd()).expect("syncfs");
    assert_eq!(mount.status().held_bytes, 4);
    dir.sync_all().expect("fsync of a directory");
    drop(dir);
    mount.umount();
}

/// Proves S-write-6.
#[test]
fn three_thousand_open_files_share_a_small_arena() {
    let sandbox = Sandbox::new("open");
    raise_open_files(8192);
    let mount = FirnMount::new(&sandbox, "arena-size=8M,chunk-size=1M");
    let mut files: Vec<_> = (0..3000)
        .map(|index| open_rw(&mount.join(format!("f{index}"))))
        .collect();
    for round in 0..4u64 {
        for (index, file) in files.iter().enumerate() {
            file.write_all_at(&bytes(round * 10_000 + index as u64, 1500), round * 1500)
                .expect("write");
        }
    }
    assert_eq!(mount.status().open_files, 3000);
    files.drain(..).for_each(drop);
    // A program that another test starts holds copies until its exec has closed them.
    wait_until("all copies are closed", Duration::from_secs(60), || {
        mount.status().open_files == 0
    });
    let backing = mount.umount();
    for index in 0..3000u64 {
        let expected: Vec<u8> = (0..4)
            .flat_map(|round| bytes(round * 10_000 + index, 1500))
            .collect();
        assert_same_bytes(
            "in the backing",
            &read(&backing.join(format!("f{index}"))),
            &expected,
        );
    }
}

/// Readers whose pages the kernel caches, by read(2) and by mapping, while a writer goes on.
/// Proves S-write-2, S-mmap-1.
#[test]
fn a_cached_reader_sees_every_write_that_returned() {
    use std::sync::atomic::{AtomicU64, Ordering};
    const PAGES: u64 = 4;
    let sandbox = Sandbox::new("coherent");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,passthrough=off");
    let path = mount.join("f");
    fs::write(&path, vec![0; (PAGES * 4096) as usize]).expect("write");
    let finished: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let writing = AtomicU64::new(1);
    std::thread::scope(|scope| {
        for mapped in [false, true] {
            let path = &path;
            let finished = &finished;
            let writing = &writing;
            scope.spawn(move || {
                let file = File::open(path).expect("open");
                // Private, as the file is open for reading only; never stored to, so it shows the cached pages.
                let mapping =
                    Mapping::new(&file, (PAGES * 4096) as usize, MapFlags::PRIVATE).expect("mmap");
                let mut page = 0;
                while writing.load(Ordering::Acquire) > 0 {
                    page = (page + 7) % PAGES;
                    let before = finished[page as usize].load(Ordering::Acquire);
                    let number =
                        |bytes: Vec<u8>| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
                    let shown = || number(mapping.read((page * 4096) as usize, 8));
                    let found = match mapped {
                        // A processor may still have the page that the kernel dropped; the file's is the new one.
                        true if shown() < before => {
                            mapping.look_again().expect("madvise");
                            shown()
                        }
                        true => shown(),
                        false => number(read_at(&file, page * 4096, 8)),
                    };
                    assert!(
                        found >= before,
                        "page {page}, mapped {mapped}: {found} after {before} was written"
                    );
                }
            });
        }
        let file = OpenOptions::new().write(true).open(&path).expect("open");
        for version in 1..=20_000u64 {
            let page = version * 5 % PAGES;
            file.write_all_at(&version.to_le_bytes(), page * 4096)
                .expect("write");
            finished[page as usize].store(version, Ordering::Release);
        }
        writing.store(0, Ordering::Release);
    });
}

/// Pages stay cached from one open to the next, and go when the backing's file changed meanwhile.
#[test]
fn what_the_kernel_cached_is_kept_until_the_file_changes() {
    let sandbox = Sandbox::new("keepcache");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,passthrough=off,attr-timeout=0s");
    let path = mount.join("f");
    let behind = mount.backing().join("f");
    fs::write(&path, bytes(1, MIB)).expect("write");
    wait_until(
        "the second reading asks nothing of firnd",
        Duration::from_secs(60),
        || {
            let before = mount.status().read_bytes;
            assert_same_bytes("cached", &read(&path), &bytes(1, MIB));
            mount.status().read_bytes == before
        },
    );
    fs::write(&behind, bytes(2, MIB)).expect("write beside the mount");
    assert_same_bytes("changed in the backing", &read(&path), &bytes(2, MIB));
    fs::write(&path, bytes(3, MIB)).expect("write");
    assert_same_bytes("changed through the mount", &read(&path), &bytes(3, MIB));
}

fn raise_open_files(count: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: Some(count.max(limit.current.unwrap_or(count))),
        maximum: Some(count.max(limit.maximum.unwrap_or(count))),
    };
    setrlimit(Resource::Nofile, wanted).expect("raise the limit of open files");
}

/// The drain of bytes that were written before put the older time back.
#[test]
fn regression_fallocate_gives_a_file_a_new_time_also_where_bytes_are_pending() {
    let sandbox = Sandbox::new("falloctime");
    let mount = FirnMount::new(&sandbox, &firn_tests::mount::patient("close=held"));
    let path = mount.join("file");
    let file = std::fs::File::create(&path).expect("create");
    file.set_len(0).expect("truncate");
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 5000], 0).expect("write");
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    file.set_modified(old).expect("utimes");
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 20_000)
        .expect("fallocate");
    drop(file);
    let backing = mount.umount();
    let modified = backing
        .join("file")
        .metadata()
        .and_then(|meta| meta.modified())
        .expect("stat");
    assert!(
        modified > old + std::time::Duration::from_secs(1_000_000),
        "the time of the utimes is back"
    );
}
