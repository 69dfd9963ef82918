//! firnd is killed, and programs only wait: another one goes on with the mount.
//!
//! `FIRN_TAKEOVER_KILLS` sets the kills under writers (`cargo xtask campaign takeover`), `FIRN_SEED` the seed.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use firn_format::live::{HEADER_BYTES, Header};
use firn_tests::ack::{returned_operations, verify};
use firn_tests::faultfs::FaultFs;
use firn_tests::mount::{SMALL, status_of};
use firn_tests::preloaded::{DIRECT_AFTER, python};
use firn_tests::random::{env_count, generator};
use firn_tests::sandbox::{is_mounted, is_zombie, keeper_of, kill, kill_alone, preload_library};
use firn_tests::trace::{CallFilter, KillAt, Moment, kill_running_at_call};
use firn_tests::transaction::firn;
use firn_tests::{FirnMount, Sandbox, helper_binary, run, seed, wait_until};
use rand::RngExt;

/// Options of a small mount that another firnd goes on with.
pub(crate) fn taken_over() -> String {
    format!("{SMALL},takeover=auto")
}

const WRITERS: u64 = 8;
const KILLS_DEFAULT: u64 = 12;
/// A user that has no part in any test.
const NOBODY: u32 = 65_534;

/// Proves S-crash-1, S-crash-11.
#[test]
fn open_files_directories_locks_and_mappings_go_on() {
    let sandbox = Sandbox::new("goon");
    let mut mount = FirnMount::new(
        &sandbox,
        &format!("{SMALL},takeover=auto,close=held,drain-age=10min"),
    );
    assert_eq!(mount.status().takeover, "ready");
    fs::create_dir_all(mount.join("deep/er")).expect("mkdir");
    let path = mount.join("deep/er/file");
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .create_new(true)
        .open(&path)
        .expect("create");
    file.write_all(b"before ").expect("write");
    let dir = File::open(mount.join("deep")).expect("open a directory");
    let locked = File::open(&path).expect("open");
    rustix::fs::flock(&locked, rustix::fs::FlockOperation::LockExclusive).expect("flock");
    let mut shell = shell_in(&mount.join("deep/er"));
    for round in 0..3 {
        let pid = mount.kill_and_go_on();
        file.write_all(format!("{round} ").as_bytes())
            .expect("append");
        say(&mut shell, "echo x >> count; cat file > copy");
        let seen = fs::read_to_string(&path).expect("read by name");
        assert!(seen.ends_with(&format!("{round} ")), "{seen}");
        let listed = rustix::fs::openat(
            &dir,
            "er/file",
            rustix::fs::OFlags::RDONLY,
            rustix::fs::Mode::empty(),
        );
        listed.expect("a directory that is open leads to what is below");
        let taken = File::open(&path).expect("open");
        let lock = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        assert!(rustix::fs::flock(&taken, lock).is_err(), "the lock goes on");
        assert!(!is_zombie(pid));
    }
    drop(shell.stdin.take());
    assert!(shell.wait().expect("the shell ends").success());
    assert_eq!(
        fs::read_to_string(mount.join("deep/er/count")).expect("read"),
        "x\nx\nx\n"
    );
    let status = mount.status();
    assert_eq!(status.takeovers, 3);
    assert_eq!(status.lost_open_files, 0);
    println!(
        "3 pauses, {:.0} ms in all, live table {} bytes",
        status.takeover_seconds * 1e3,
        status.live_table_bytes
    );
    let mut back = String::new();
    file.seek(SeekFrom::Start(0)).expect("seek");
    file.read_to_string(&mut back).expect("read");
    assert_eq!(back, "before 0 1 2 ");
    drop((file, dir, locked));
    let backing = mount.umount();
    assert_eq!(
        fs::read_to_string(backing.join("deep/er/file")).expect("read"),
        "before 0 1 2 "
    );
    assert_eq!(
        extensions(&sandbox, "live"),
        0,
        "the table goes with the mount"
    );
}

/// A shell with its working directory in the mount.
fn shell_in(dir: &Path) -> Child {
    Command::new("sh")
        .arg("-e")
        .current_dir(dir)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("sh")
}

fn say(shell: &mut Child, line: &str) {
    let stdin = shell.stdin.as_mut().expect("stdin");
    writeln!(stdin, "{line}").expect("the shell lives");
}

fn extensions(sandbox: &Sandbox, extension: &str) -> usize {
    let entries = fs::read_dir(sandbox.runtime()).expect("list").flatten();
    entries
        .filter(|entry| {
            entry
                .path()
                .extension()
                .is_some_and(|found| found == extension)
        })
        .count()
}

/// Proves S-crash-11, S-write-1.
#[test]
fn writers_see_no_error_while_firnd_is_killed_again_and_again() {
    run_writers_under_kills("writers", "", |_| {});
}

/// They lose their data socket with firnd, and write through the kernel, or with direct access that the next one gives.
///
/// Proves S-crash-11, S-write-1.
#[test]
fn writers_with_direct_access_see_no_error_while_firnd_is_killed_again_and_again() {
    run_writers_under_kills("writers with direct access", "", |writer| {
        writer
            .env("LD_PRELOAD", preload_library())
            .env(DIRECT_AFTER, "0");
    });
}

/// Proves S-crash-11, S-log-1.
#[test]
fn writers_to_logs_see_no_error_while_firnd_is_killed_again_and_again() {
    run_writers_under_kills("writers to logs", ",layout=log", |_| {});
}

fn run_writers_under_kills(name: &str, options: &str, prepare: fn(&mut Command)) {
    let seed = seed(&format!("takeover under {name}"));
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("writers");
    let options = format!("arena-size=64M,chunk-size=1M,takeover=auto{options}");
    let mut mount = FirnMount::new(&sandbox, &options);
    let mut writers: Vec<(Child, PathBuf, PathBuf)> = Vec::new();
    for index in 0..WRITERS {
        let dir = mount.join(format!("w{index}"));
        let log = sandbox.join(format!("log{index}"));
        fs::create_dir(&dir).expect("mkdir");
        let mut writer = Command::new(helper_binary());
        writer.arg("writer").arg(&dir).arg(&log);
        writer.arg((seed ^ index).to_string());
        prepare(&mut writer);
        writers.push((writer.spawn().expect("start a writer"), dir, log));
    }
    let kills = env_count("FIRN_TAKEOVER_KILLS", KILLS_DEFAULT);
    let began = Instant::now();
    let mut pauses = Vec::new();
    for number in 0..kills {
        mount.note_progress();
        // The random moment is the point of the test, not a wait for a condition.
        std::thread::sleep(Duration::from_millis(rng.random_range(300..900)));
        mount.kill_and_go_on();
        for (writer, ..) in &mut writers {
            let ended = writer.try_wait().expect("wait");
            assert!(
                ended.is_none(),
                "a writer saw an error after kill {number}: {ended:?}"
            );
        }
        pauses.push(mount.status().takeover_last_seconds);
    }
    // All of them go on after the last one.
    let before: Vec<u64> = writers
        .iter()
        .map(|(.., log)| returned_operations(log) as u64)
        .collect();
    let all_go_on = || {
        let mut both = writers.iter().zip(&before);
        both.all(|((.., log), before)| returned_operations(log) as u64 > *before)
    };
    wait_until("each writer goes on", Duration::from_secs(60), all_go_on);
    for (writer, ..) in &mut writers {
        writer.kill().expect("kill a writer");
        writer.wait().expect("wait");
    }
    assert_eq!(mount.status().takeovers, kills);
    let mut operations = 0;
    for (_, dir, log) in &writers {
        // A campaign has gigabytes to compare.
        mount.note_progress();
        operations += verify(dir, log).ops;
    }
    let backing = mount.umount();
    for (_, dir, log) in &writers {
        verify(&backing.join(dir.file_name().expect("a name")), log);
    }
    pauses.sort_by(f64::total_cmp);
    println!(
        "{name}: {kills} kills in {:?}, {operations} operations, pause p50 {:.0} ms, max {:.0} ms",
        began.elapsed(),
        pauses[pauses.len() / 2] * 1e3,
        pauses[pauses.len() - 1] * 1e3
    );
}

/// One line of the table of `docs/internals/takeover.md`.
struct Line {
    name: &'static str,
    call: CallFilter,
    prepare: fn(&Path),
    act: fn(&Path) -> std::io::Result<()>,
    check: fn(&Path),
}

pub(crate) fn is(number: libc::c_long, wanted: &[libc::c_long]) -> bool {
    wanted.contains(&number)
}

const LINES: [Line; 17] = [
    Line {
        name: "mkdir",
        call: |number, _| is(number, &[libc::SYS_mkdirat]),
        prepare: |_| {},
        act: |dir| fs::create_dir(dir.join("new")),
        check: |dir| assert!(dir.join("new").is_dir()),
    },
    Line {
        name: "mknod",
        call: |number, _| is(number, &[libc::SYS_mknodat]),
        prepare: |_| {},
        act: |dir| {
            let made = rustix::fs::mknodat(
                rustix::fs::CWD,
                dir.join("new"),
                rustix::fs::FileType::Fifo,
                rustix::fs::Mode::RUSR,
                0,
            );
            Ok(made?)
        },
        check: |dir| assert!(dir.join("new").symlink_metadata().is_ok()),
    },
    Line {
        name: "symlink",
        call: |number, _| is(number, &[libc::SYS_symlinkat]),
        prepare: |_| {},
        act: |dir| std::os::unix::fs::symlink("target", dir.join("new")),
        check: |dir| {
            assert_eq!(
                fs::read_link(dir.join("new")).expect("read"),
                Path::new("target")
            )
        },
    },
    Line {
        name: "create with O_EXCL",
        call: |number, arguments| {
            is(number, &[libc::SYS_openat]) && arguments[2] & libc::O_CREAT as u64 != 0
        },
        prepare: |_| {},
        act: |dir| {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).open(dir.join("new"))?;
            file.write_all(b"bytes")
        },
        check: |dir| assert_eq!(fs::read(dir.join("new")).expect("read"), b"bytes"),
    },
    Line {
        name: "link",
        call: |number, _| is(number, &[libc::SYS_linkat]),
        prepare: |dir| fs::write(dir.join("old"), "old").expect("write"),
        act: |dir| fs::hard_link(dir.join("old"), dir.join("new")),
        check: |dir| assert_eq!(fs::metadata(dir.join("new")).expect("stat").nlink(), 2),
    },
    Line {
        name: "unlink",
        call: |number, _| is(number, &[libc::SYS_unlinkat]),
        prepare: |dir| fs::write(dir.join("old"), "old").expect("write"),
        act: |dir| fs::remove_file(dir.join("old")),
        check: |dir| assert!(!dir.join("old").exists()),
    },
    Line {
        name: "unlink of an open file",
        call: |number, _| is(number, &[libc::SYS_unlinkat]),
        prepare: |dir| fs::write(dir.join("old"), "old bytes").expect("write"),
        act: |dir| go_on_without_name(&dir.join("old"), || fs::remove_file(dir.join("old"))),
        check: |dir| assert!(!dir.join("old").exists()),
    },
    Line {
        name: "rename over an open file",
        call: is_rename,
        prepare: |dir| {
            fs::write(dir.join("old"), "old bytes").expect("write");
            fs::write(dir.join("new"), "new").expect("write");
        },
        act: |dir| {
            let rename = || fs::rename(dir.join("new"), dir.join("old"));
            go_on_without_name(&dir.join("old"), rename)
        },
        check: |dir| assert_eq!(fs::read(dir.join("old")).expect("read"), b"new"),
    },
    Line {
        name: "rmdir",
        call: |number, _| is(number, &[libc::SYS_unlinkat]),
        prepare: |dir| fs::create_dir(dir.join("old")).expect("mkdir"),
        act: |dir| fs::remove_dir(dir.join("old")),
        check: |dir| assert!(!dir.join("old").exists()),
    },
    Line {
        name: "rename of a file over another",
        call: is_rename,
        prepare: |dir| {
            fs::write(dir.join("old"), "old").expect("write");
            fs::write(dir.join("new"), "replaced").expect("write");
        },
        act: |dir| fs::rename(dir.join("old"), dir.join("new")),
        check: |dir| {
            assert!(!dir.join("old").exists());
            assert_eq!(fs::read(dir.join("new")).expect("read"), b"old");
        },
    },
    Line {
        name: "rename of a directory",
        call: is_rename,
        prepare: |dir| {
            fs::create_dir(dir.join("old")).expect("mkdir");
            fs::write(dir.join("old/below"), "below").expect("write");
        },
        act: |dir| fs::rename(dir.join("old"), dir.join("new")),
        check: |dir| {
            assert!(!dir.join("old").exists());
            assert_eq!(fs::read(dir.join("new/below")).expect("read"), b"below");
        },
    },
    Line {
        name: "exchange",
        call: is_rename,
        prepare: |dir| {
            fs::write(dir.join("old"), "old").expect("write");
            fs::create_dir(dir.join("new")).expect("mkdir");
        },
        act: |dir| {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            let here = rustix::fs::CWD;
            Ok(rustix::fs::renameat_with(
                here,
                dir.join("old"),
                here,
                dir.join("new"),
                flags,
            )?)
        },
        check: |dir| {
            assert!(dir.join("old").is_dir());
            assert_eq!(fs::read(dir.join("new")).expect("read"), b"old");
        },
    },
    Line {
        name: "chmod",
        call: |number, _| {
            is(
                number,
                &[libc::SYS_fchmod, libc::SYS_chmod, libc::SYS_fchmodat],
            )
        },
        prepare: |dir| fs::write(dir.join("old"), "old").expect("write"),
        act: |dir| fs::set_permissions(dir.join("old"), fs::Permissions::from_mode(0o640)),
        check: |dir| {
            let mode = fs::metadata(dir.join("old")).expect("stat").mode();
            assert_eq!(mode & 0o777, 0o640);
        },
    },
    Line {
        name: "setxattr with XATTR_CREATE",
        call: |number, _| {
            is(
                number,
                &[libc::SYS_fsetxattr, libc::SYS_setxattr, libc::SYS_lsetxattr],
            )
        },
        prepare: |dir| fs::write(dir.join("old"), "old").expect("write"),
        act: |dir| {
            let create = rustix::fs::XattrFlags::CREATE;
            Ok(rustix::fs::setxattr(
                dir.join("old"),
                "user.one",
                b"value",
                create,
            )?)
        },
        check: |dir| {
            let mut value = [0; 8];
            let len = rustix::fs::getxattr(dir.join("old"), "user.one", &mut value);
            assert_eq!(len, Ok(5));
        },
    },
    Line {
        name: "removexattr",
        call: |number, _| {
            let removals = [
                libc::SYS_fremovexattr,
                libc::SYS_removexattr,
                libc::SYS_lremovexattr,
            ];
            is(number, &removals)
        },
        prepare: |dir| {
            fs::write(dir.join("old"), "old").expect("write");
            let none = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(dir.join("old"), "user.one", b"value", none).expect("set");
        },
        act: |dir| Ok(rustix::fs::removexattr(dir.join("old"), "user.one")?),
        check: |dir| {
            let mut list = [0; 64];
            assert_eq!(rustix::fs::listxattr(dir.join("old"), &mut list), Ok(0));
        },
    },
    Line {
        name: "truncate",
        call: |number, _| is(number, &[libc::SYS_ftruncate]),
        prepare: |dir| fs::write(dir.join("old"), "0123456789").expect("write"),
        act: |dir| {
            OpenOptions::new()
                .write(true)
                .open(dir.join("old"))?
                .set_len(4)
        },
        check: |dir| assert_eq!(fs::read(dir.join("old")).expect("read"), b"0123"),
    },
    Line {
        name: "fsync",
        call: |number, _| is(number, &[libc::SYS_fsync, libc::SYS_fdatasync]),
        prepare: |dir| fs::write(dir.join("old"), "old").expect("write"),
        act: |dir| {
            let file = OpenOptions::new().write(true).open(dir.join("old"))?;
            file.write_all_at(b"new", 0)?;
            file.sync_all()
        },
        check: |dir| assert_eq!(fs::read(dir.join("old")).expect("read"), b"new"),
    },
];

/// What firnd does for all hosts when files are in logs.
const LINES_OF_LOGS: [Line; 5] = [
    Line {
        name: "append: its bytes",
        call: |number, _| is(number, &[libc::SYS_pwrite64, libc::SYS_pwritev]),
        prepare: prepare_lines,
        act: append_lines,
        check: check_lines,
    },
    Line {
        name: "append: its sync",
        call: |number, _| is(number, &[libc::SYS_fsync, libc::SYS_fdatasync]),
        prepare: prepare_lines,
        act: append_lines,
        check: check_lines,
    },
    Line {
        name: "append: the lock of the end",
        call: is_ofd_lock,
        prepare: prepare_lines,
        act: append_lines,
        check: check_lines,
    },
    Line {
        name: "lock and unlock",
        call: is_ofd_lock,
        prepare: prepare_lines,
        act: lock_and_unlock,
        check: |_| {},
    },
    Line {
        name: "close with a lock",
        call: is_ofd_lock,
        prepare: prepare_lines,
        act: |dir| {
            let lock = rustix::fs::FlockOperation::LockExclusive;
            for _ in 0..2 {
                rustix::fs::flock(&File::open(dir.join("lines"))?, lock)?;
            }
            Ok(())
        },
        check: |_| {},
    },
];

/// Calls of each line at which firnd is killed.
const CALLS_OF_LOGS: usize = 4;

fn is_ofd_lock(number: libc::c_long, arguments: &[u64; 6]) -> bool {
    number == libc::SYS_fcntl && arguments[1] == libc::F_OFD_SETLK as u64
}

fn prepare_lines(dir: &Path) {
    fs::write(dir.join("lines"), "one\n").expect("write");
}

fn append_lines(dir: &Path) -> std::io::Result<()> {
    let mut file = OpenOptions::new().append(true).open(dir.join("lines"))?;
    file.write_all(b"two\n")?;
    file.write_all(b"three\n")
}

fn check_lines(dir: &Path) {
    let lines = fs::read_to_string(dir.join("lines")).expect("read");
    assert_eq!(lines, "one\ntwo\nthree\n");
}

/// Takes and releases a lock, and sees both through another open file.
fn lock_and_unlock(dir: &Path) -> std::io::Result<()> {
    use rustix::fs::FlockOperation::{
        LockExclusive, NonBlockingLockExclusive, NonBlockingLockShared, Unlock,
    };
    let holder = File::open(dir.join("lines"))?;
    let other = File::open(dir.join("lines"))?;
    rustix::fs::flock(&holder, LockExclusive)?;
    let refused = rustix::fs::flock(&other, NonBlockingLockShared);
    assert_eq!(refused, Err(rustix::io::Errno::WOULDBLOCK));
    rustix::fs::flock(&holder, Unlock)?;
    Ok(rustix::fs::flock(&other, NonBlockingLockExclusive)?)
}

/// Uses a file that loses its name while it is open. It holds "old bytes".
fn go_on_without_name(
    path: &Path,
    remove_name: impl FnOnce() -> std::io::Result<()>,
) -> std::io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    file.write_all_at(b"OLD", 0)?;
    remove_name()?;
    file.write_all_at(b"more", 9)?;
    let mut found = [0; 13];
    file.read_exact_at(&mut found, 0)?;
    assert_eq!(&found, b"OLD bytesmore");
    file.set_len(3)?;
    assert_eq!(file.metadata()?.len(), 3);
    Ok(())
}

fn is_rename(number: libc::c_long, _: &[u64; 6]) -> bool {
    is(number, &[libc::SYS_renameat2, libc::SYS_renameat])
}

/// Runs `act` with firnd killed at a call, and has the next one go on. Returns whether `act` came to that call.
pub(crate) fn act_with_kill(
    mount: &mut FirnMount<'_>,
    at: KillAt,
    act: impl FnOnce() -> std::io::Result<()>,
) -> std::io::Result<bool> {
    mount.note_progress();
    mount.wait_until_served_well();
    let before = mount.pid();
    let (attached, is_attached) = mpsc::channel();
    let (done, is_reached) = std::thread::scope(|scope| {
        scope.spawn(move || kill_running_at_call(before, at, &attached));
        is_attached
            .recv_timeout(Duration::from_secs(60))
            .expect("the tracer attaches");
        let done = act();
        let is_reached = is_zombie(before);
        // The tracer waits for the end of what it traces.
        kill_alone(before, libc::SIGKILL);
        (done, is_reached)
    });
    mount.note_takeover(before);
    done.map(|()| is_reached)
}

/// Proves S-crash-12.
#[test]
fn each_change_takes_effect_once_with_firnd_killed_before_and_after_it() {
    let reached = kill_around_each_change(&LINES, 1, &taken_over());
    assert_eq!(reached, 2 * LINES.len(), "each call is made");
}

/// Proves S-crash-12: changes in logs make other calls, and some make none of those.
#[test]
fn each_change_in_logs_takes_effect_once_with_firnd_killed_before_and_after_it() {
    let options = format!("{},layout=log", taken_over());
    kill_around_each_change(&LINES, 1, &options);
    let reached = kill_around_each_change(&LINES_OF_LOGS, CALLS_OF_LOGS, &options);
    assert!(reached >= 4 * LINES_OF_LOGS.len(), "most calls are made");
}

/// Kills firnd before and after each of the first `calls` calls of each line. Returns how many of them were made.
fn kill_around_each_change(lines: &[Line], calls: usize, options: &str) -> usize {
    let sandbox = Sandbox::new("once");
    let mut mount = FirnMount::new(&sandbox, options);
    let mut reached = 0;
    let mut checks = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let kills = (0..calls).flat_map(|skip| MOMENTS.map(|when| (skip, when)));
        for (skip, when) in kills {
            let name = PathBuf::from(format!("{index}-{skip}-{when:?}"));
            let dir = mount.join(&name);
            fs::create_dir(&dir).expect("mkdir");
            (line.prepare)(&dir);
            let call = line.call;
            let at = KillAt { call, skip, when };
            let done = act_with_kill(&mut mount, at, || (line.act)(&dir));
            let kill = format!("{}, killed {when:?} call {skip}", line.name);
            reached += usize::from(done.unwrap_or_else(|error| panic!("{kill}: {error}")));
            (line.check)(&dir);
            println!("{kill}: once");
            checks.push((name, line.check));
        }
    }
    assert_eq!(mount.status().takeovers as usize, checks.len());
    assert_eq!(mount.status().lost_open_files, 0);
    let backing = mount.umount();
    for (name, check) in checks {
        check(&backing.join(name));
    }
    reached
}

const MOMENTS: [Moment; 2] = [Moment::Before, Moment::After];

/// An answer of firnd to the kernel.
pub(crate) fn is_answer(number: libc::c_long, _: &[u64; 6]) -> bool {
    is(number, &[libc::SYS_writev])
}

/// All that a program does to a file and a directory, with what each call must give.
fn use_all_requests(dir: &Path) -> std::io::Result<()> {
    let path = dir.join("file");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    file.write_all(b"0123456789")?;
    file.write_all_at(b"x", 3)?;
    file.sync_all()?;
    let mut read = String::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_string(&mut read)?;
    assert_eq!(read, "012x456789");
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, 64)?;
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0))?, 10);
    file.set_len(6)?;
    drop(file);
    use_names(dir, &path)?;
    use_attributes(&path)?;
    copy_within(dir)?;
    rustix::fs::statvfs(dir)?;
    fs::remove_file(&path)?;
    fs::remove_file(dir.join("copy"))?;
    fs::remove_dir(dir)
}

fn use_names(dir: &Path, path: &Path) -> std::io::Result<()> {
    fs::create_dir(dir.join("sub"))?;
    std::os::unix::fs::symlink("file", dir.join("link"))?;
    assert_eq!(fs::read_link(dir.join("link"))?, Path::new("file"));
    fs::hard_link(path, dir.join("other"))?;
    assert_eq!(fs::metadata(path)?.nlink(), 2);
    fs::rename(dir.join("other"), dir.join("sub/moved"))?;
    let mut names: Vec<_> = fs::read_dir(dir)?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<_, _>>()?;
    names.sort();
    assert_eq!(names, ["file", "link", "sub"]);
    assert_eq!(fs::read(dir.join("sub/moved"))?, b"012x45");
    fs::remove_file(dir.join("sub/moved"))?;
    fs::remove_file(dir.join("link"))?;
    fs::remove_dir(dir.join("sub"))
}

fn use_attributes(path: &Path) -> std::io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    assert_eq!(fs::metadata(path)?.mode() & 0o777, 0o600);
    let create = rustix::fs::XattrFlags::CREATE;
    rustix::fs::setxattr(path, "user.one", b"value", create)?;
    let mut value = [0; 8];
    assert_eq!(rustix::fs::getxattr(path, "user.one", &mut value)?, 5);
    let mut list = [0; 64];
    assert_eq!(rustix::fs::listxattr(path, &mut list)?, 9);
    rustix::fs::removexattr(path, "user.one")?;
    Ok(())
}

fn copy_within(dir: &Path) -> std::io::Result<()> {
    let from = File::open(dir.join("file"))?;
    let to = File::create_new(dir.join("copy"))?;
    assert_eq!(rustix::fs::copy_file_range(&from, None, &to, None, 6)?, 6);
    drop((from, to));
    assert_eq!(fs::read(dir.join("copy"))?, b"012x45");
    Ok(())
}

/// Requests of [`use_all_requests`] at which CI kills firnd; a campaign kills it at each.
const ANSWERS_OF_CI: usize = 8;

/// Proves S-crash-11, S-crash-12.
#[test]
fn each_request_is_answered_with_firnd_killed_before_its_answer() {
    kill_before_answers(&taken_over());
}

/// Proves S-crash-11, S-crash-12.
#[test]
fn each_request_about_logs_is_answered_with_firnd_killed_before_its_answer() {
    kill_before_answers(&format!("{},layout=log", taken_over()));
}

fn kill_before_answers(options: &str) {
    let seed = seed("answers");
    let sandbox = Sandbox::new("answers");
    let mut mount = FirnMount::new(&sandbox, options);
    let is_campaign = env_count("FIRN_TAKEOVER_KILLS", 0) > 0;
    let step = if is_campaign { 1 } else { ANSWERS_OF_CI };
    let mut kills = 0;
    for skip in (seed as usize % step..).step_by(step) {
        let dir = mount.join(format!("{skip}"));
        fs::create_dir(&dir).expect("mkdir");
        let when = Moment::Before;
        let at = KillAt {
            call: is_answer,
            skip,
            when,
        };
        let done = act_with_kill(&mut mount, at, || use_all_requests(&dir));
        match done {
            Ok(true) => kills += 1,
            Ok(false) => break,
            Err(error) => panic!("firnd was killed before its answer number {skip}: {error}"),
        }
    }
    assert_eq!(mount.status().lost_open_files, 0);
    mount.umount();
    println!("{kills} kills, every {step}. answer");
    assert!(kills > 3);
}

/// A service manager as far as `firn` uses one: it stores descriptors (sd_notify(3)), and starts a program that was killed
/// again, with these descriptors (sd_listen_fds(3)). Prints the number of each process. Kills the program when its standard
/// input ends, as after a failed test.
const SERVICE_MANAGER: &str = r#"
import array, fcntl, os, signal, socket, sys
directory, command = sys.argv[1], sys.argv[2:]
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.bind(directory + "/notify")
notify.settimeout(0.02)
stored = {}
def start():
    names = list(stored)
    process = os.fork()
    if process:
        print(process, flush=True)
        return process
    environment = dict(os.environ, NOTIFY_SOCKET=directory + "/notify", FDSTORE="4096")
    if names:
        environment.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(names)), LISTEN_FDNAMES=":".join(names))
    high = [fcntl.fcntl(stored[name], fcntl.F_DUPFD, 500) for name in names]
    for at, descriptor in enumerate(high):
        os.dup2(descriptor, 3 + at, inheritable=True)
    os.closerange(3 + len(names), 4096)
    os.execvpe(command[0], command, environment)
def receive():
    try:
        state, rights, _, _ = notify.recvmsg(4096, socket.CMSG_SPACE(4))
    except TimeoutError:
        return False
    words = dict(line.split("=", 1) for line in state.decode().splitlines())
    name = words.get("FDNAME")
    if "FDSTOREREMOVE" in words and name in stored:
        os.close(stored.pop(name))
    if "FDSTORE" in words:
        descriptors = array.array("i")
        descriptors.frombytes(rights[0][2])
        stored[name] = descriptors[0]
    return True
os.set_blocking(0, False)
def is_abandoned():
    try:
        return os.read(0, 1) == b""
    except BlockingIOError:
        return False
process = start()
while True:
    while receive():
        pass
    if is_abandoned():
        os.kill(process, signal.SIGKILL)
        sys.exit(1)
    ended, status = os.waitpid(process, os.WNOHANG)
    if ended and os.WIFSIGNALED(status):
        process = start()
    elif ended:
        sys.exit(os.waitstatus_to_exitcode(status) or len(stored))
"#;

/// Proves S-crash-11, S-crash-14: systemd keeps a mount in the foreground as the keeper does.
#[test]
fn a_service_manager_has_the_keepers_place() {
    let sandbox = Sandbox::new("manager");
    let (backing, point) = (sandbox.join("backing"), sandbox.join("mnt"));
    let mut manager = python(SERVICE_MANAGER, sandbox.path());
    let mount = sandbox.firn(["mount", "--foreground", "-o", SMALL]);
    manager.arg(mount.get_program()).args(mount.get_args());
    manager.arg(&backing).arg(&point);
    sandbox.environment(&mut manager);
    let mut manager = manager
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("start the service manager");
    let mut processes = BufReader::new(manager.stdout.take().expect("its output")).lines();
    let mut next_process = || -> u32 {
        let line = processes.next().expect("a line").expect("read");
        line.parse().expect("a process")
    };
    let serves = |process: u32| {
        let is_it = || is_mounted(&point) && status_of(&sandbox, &point).pid == process;
        wait_until("firnd serves", Duration::from_secs(60), is_it);
    };
    let mut firnd = next_process();
    wait_until("the mount is there", Duration::from_secs(60), || {
        is_mounted(&point)
    });
    serves(firnd);
    assert_eq!(status_of(&sandbox, &point).takeover, "ready");
    let file = File::create(point.join("file")).expect("create");
    let nameless = File::create(point.join("nameless")).expect("create");
    fs::remove_file(point.join("nameless")).expect("unlink");
    for round in 0..3_u64 {
        kill_alone(firnd, libc::SIGKILL);
        file.write_all_at(b"round", round * 5).expect("write");
        nameless.write_all_at(b"round", round * 5).expect("write");
        firnd = next_process();
        serves(firnd);
        assert_eq!(status_of(&sandbox, &point).takeovers, round + 1);
    }
    assert_eq!(nameless.metadata().expect("stat").len(), 15);
    let refused = sandbox.run(["upgrade".as_ref(), point.as_os_str()]);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("service manager"), "{refused}");
    drop((file, nameless));
    sandbox.run(["umount".as_ref(), point.as_os_str()]).ok();
    // wait(2) by the library would close its standard input first.
    let mut ended = None;
    wait_until("the service manager ends", Duration::from_secs(60), || {
        ended = manager.try_wait().expect("wait");
        ended.is_some()
    });
    assert!(
        ended.is_some_and(|ended| ended.success()),
        "descriptors are left, or firnd failed: {ended:?}"
    );
    assert_eq!(
        fs::read(backing.join("file")).expect("read"),
        b"roundroundround"
    );
}

/// Proves S-crash-13.
#[test]
fn a_firnd_that_is_killed_while_it_takes_over_is_replaced_too() {
    let sandbox = Sandbox::new("twice");
    let mut mount = FirnMount::new(
        &sandbox,
        &format!("{SMALL},takeover=auto,close=held,drain-age=10min"),
    );
    let file = File::create(mount.join("file")).expect("create");
    file.write_all_at(b"one", 0).expect("write");
    let keeper = keeper_of(mount.pid()).expect("a keeper");
    let first = mount.pid();
    kill_alone(first, libc::SIGKILL);
    // Each of them dies before or right after it serves: fewer than end the mount.
    for _ in 0..3 {
        let mut next = None;
        wait_until("the next firnd is there", Duration::from_secs(30), || {
            next = child_of(keeper);
            next.is_some()
        });
        kill_alone(next.expect("a process"), libc::SIGKILL);
    }
    file.write_all_at(b"two", 3).expect("write");
    mount.note_takeover(first);
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"onetwo");
    drop(file);
    mount.umount();
}

/// A child of a process, by whichever of its threads, that has not ended.
pub(crate) fn child_of(parent: u32) -> Option<u32> {
    let threads = fs::read_dir(format!("/proc/{parent}/task")).ok()?.flatten();
    let lists =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let pids: Vec<u32> = lists
        .flat_map(|list| {
            list.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter_map(|pid| pid.parse().ok())
        .collect();
    pids.into_iter().find(|pid| !is_zombie(*pid))
}

/// Proves S-crash-13.
#[test]
fn firnd_starts_another_keeper_and_with_both_killed_programs_get_errors() {
    let sandbox = Sandbox::new("keeper");
    let mut mount = FirnMount::new(&sandbox, &taken_over());
    let file = File::create(mount.join("file")).expect("create");
    let keeper = keeper_of(mount.pid()).expect("a keeper");
    println!(
        "memory of the keeper: {} KiB, own {} KiB",
        memory_kib(keeper, "VmRSS"),
        memory_kib(keeper, "RssAnon")
    );
    assert!(memory_kib(keeper, "RssAnon") <= 2048);
    kill_alone(keeper, libc::SIGKILL);
    let firnd = mount.pid();
    wait_until("another keeper is there", Duration::from_secs(30), || {
        child_of(firnd).is_some_and(|child| name_of(child) == "firn-keeper")
    });
    // It has what the first one had once firnd says so.
    wait_until("it is said", Duration::from_secs(30), || {
        sandbox.logs().contains("another one has taken its place")
    });
    mount.kill_and_go_on();
    file.write_all_at(b"on", 0).expect("write");
    kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    let refused = file.write_all_at(b"off", 0).expect_err("nobody serves");
    let errno = refused.raw_os_error();
    assert!(
        matches!(errno, Some(libc::ENOTCONN | libc::ECONNABORTED)),
        "{refused}"
    );
    drop(file);
    let again = FirnMount::new(&sandbox, &taken_over());
    assert_eq!(fs::read(again.join("file")).expect("read"), b"on");
    again.umount();
}

fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

fn memory_kib(pid: u32, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let found = status
        .lines()
        .find(|found| found.starts_with(line))
        .expect("a line");
    let number = found.split_whitespace().nth(1).expect("a number");
    number.parse().expect("a number")
}

/// Proves S-crash-13.
#[test]
fn a_table_that_is_damaged_or_of_another_version_or_user_ends_the_mount_and_loses_nothing() {
    let spoilt: [(&str, Spoil); 4] = [
        ("magic", |table| change_byte(table, 0)),
        ("version", |table| change_byte(table, 8)),
        ("header", |table| change_byte(table, 100)),
        ("owner", |table| {
            std::os::unix::fs::fchown(table, Some(NOBODY), None).expect("chown");
        }),
    ];
    for (what, spoil) in spoilt {
        let sandbox = Sandbox::new("table");
        let mount = FirnMount::new(
            &sandbox,
            &format!("{SMALL},takeover=auto,close=held,drain-age=10min"),
        );
        let file = File::create(mount.join("file")).expect("create");
        file.write_all_at(b"acknowledged", 0).expect("write");
        let table = sandbox.arena().with_extension("live");
        let table = OpenOptions::new()
            .read(true)
            .write(true)
            .open(table)
            .expect("open");
        spoil(&table);
        kill_alone(mount.pid(), libc::SIGKILL);
        wait_until("programs get an error", Duration::from_secs(60), || {
            let written = file
                .write_all_at(b"x", 0)
                .map_err(|error| error.raw_os_error());
            matches!(written, Err(Some(libc::ENOTCONN | libc::ECONNABORTED)))
        });
        assert!(
            sandbox.logs().contains("the mount is not taken over"),
            "{what}"
        );
        drop(file);
        mount.abandon();
        let again = FirnMount::new(&sandbox, &taken_over());
        assert_eq!(
            fs::read(again.join("file")).expect("read"),
            b"acknowledged",
            "{what}"
        );
        again.umount();
    }
}

/// Makes a live table one that is not to be believed.
type Spoil = fn(&File);

fn change_byte(table: &File, at: u64) {
    let mut byte = [0];
    table.read_exact_at(&mut byte, at).expect("read");
    table.write_all_at(&[byte[0] ^ 0x40], at).expect("write");
}

/// FUSE_HAS_RESEND in the second word of flags of an INIT request, and where that word is: after the header of 40 bytes
/// and four words.
const RESEND_IN_FLAGS2: u32 = 1 << 7;
const FLAGS2_AT: usize = 40 + 4 * 4;

/// Makes the kernel of a mount one that does not send requests again, as far as the next firnd knows.
fn forget_resends(sandbox: &Sandbox) {
    let path = sandbox.arena().with_extension("live");
    let table = OpenOptions::new().read(true).write(true).open(path);
    let table = table.expect("open");
    let mut bytes = vec![0; HEADER_BYTES];
    table.read_exact_at(&mut bytes, 0).expect("read");
    let mut header = Header::decode(&bytes).expect("a header");
    let flags = &mut header.exchange.asked[FLAGS2_AT..FLAGS2_AT + 4];
    let word = u32::from_ne_bytes(flags.try_into().expect("a word"));
    assert_ne!(word & RESEND_IN_FLAGS2, 0);
    flags.copy_from_slice(&(word & !RESEND_IN_FLAGS2).to_ne_bytes());
    let encoded = header.encode().expect("it fits");
    table.write_all_at(&encoded, 0).expect("write");
}

/// A call of a program about a path.
type Call = fn(&Path) -> std::io::Result<()>;

/// As before Linux 6.9: the kernel is never asked to send requests again, and does not.
///
/// Proves S-crash-16.
#[test]
fn without_resends_requests_under_way_end_with_an_error_and_all_else_goes_on() {
    let sandbox = Sandbox::new("resends");
    let fault = FaultFs::new(&sandbox);
    let options = format!("{SMALL},takeover=auto,close=held,drain-age=10min,attr-timeout=10min");
    let mut mount = FirnMount::over(&sandbox, fault.path(), &options);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(mount.join("file"))
        .expect("create");
    file.write_all_at(b"one", 0).expect("write");
    for name in ["hung", "goes-on"] {
        fs::create_dir(mount.join(name)).expect("mkdir");
    }
    let dir = File::open(mount.join("hung")).expect("open a directory");
    forget_resends(&sandbox);
    // The first takeover learns it, and notes all requests from then on.
    mount.kill_and_go_on();
    assert!(
        mount.status().takeover.contains("EIO"),
        "{}",
        mount.status().takeover
    );
    let calls: [(&str, Call); 3] = [
        ("lookup", |path| fs::symlink_metadata(path).map(drop)),
        ("mkdir", |path| fs::create_dir(path)),
        ("lookup", |path| File::open(path).map(drop)),
    ];
    for (round, (operation, call)) in (0..).zip(calls) {
        mount.wait_until_served_well();
        let before = mount.pid();
        fault.hang(operation, "hung/");
        let path = mount.join(format!("hung/new{round}"));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| call(&path));
            wait_until("it hangs", Duration::from_secs(60), || {
                fault.hung_count() >= 1
            });
            kill_alone(before, libc::SIGKILL);
            fault.let_go();
            let refused = waits
                .join()
                .expect("it ends")
                .expect_err("it was under way");
            assert_eq!(refused.raw_os_error(), Some(libc::EIO), "{operation}");
        });
        mount.note_takeover(before);
        file.write_all_at(b"two", 3 * (round + 1))
            .expect("open files go on");
        fs::create_dir(mount.join(format!("goes-on/dir{round}"))).expect("mkdir");
        let made = fs::read_dir(mount.join("hung")).expect("list").count() as u64;
        assert!(made <= round + 1, "{made}");
    }
    let mut bytes = [0; 12];
    file.read_exact_at(&mut bytes, 0).expect("read");
    assert_eq!(&bytes, b"onetwotwotwo");
    assert_eq!(mount.status().lost_open_files, 0);
    drop((file, dir));
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read"), bytes);
}

/// Proves S-crash-15.
#[test]
fn a_firnd_that_stands_still_is_killed_and_another_one_goes_on() {
    let sandbox = Sandbox::new("stands");
    let options = format!("{SMALL},takeover=auto,watchdog=500ms");
    let mut mount = FirnMount::new(&sandbox, &options);
    let file = File::create(mount.join("file")).expect("create");
    file.write_all_at(b"one", 0).expect("write");
    let first = mount.pid();
    // One that answers is left alone, however often it is asked.
    wait_until("it is asked often", Duration::from_secs(60), || {
        mount.status().uptime_seconds > 2.0
    });
    assert_eq!(mount.status().pid, first);
    for (index, bytes) in (1..).zip([b"two", b"3rd"]) {
        mount.wait_until_served_well();
        let before = mount.pid();
        kill_alone(before, libc::SIGSTOP);
        file.write_all_at(bytes, 3 * index).expect("programs wait");
        mount.note_takeover(before);
    }
    assert!(sandbox.logs().contains("firnd does not answer"));
    assert_eq!(mount.status().takeovers, 2);
    drop(file);
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"onetwo3rd");
}

/// The keeper holds the locks of the mount, so neither a mount nor `firn recover` comes between two firnd.
///
/// Proves S-crash-11.
#[test]
fn no_other_process_takes_the_backing_while_no_firnd_is_there() {
    let sandbox = Sandbox::new("between");
    let options = format!("{},close=held,drain-age=10min", taken_over());
    let mut mount = FirnMount::new(&sandbox, &options);
    // This process has no file of the mount open: its children would wait for the firnd that is not there.
    fs::write(mount.join("file"), "held").expect("write");
    let other = sandbox.join("other");
    fs::create_dir(&other).expect("mkdir");
    let backing = mount.backing().to_owned();
    let keeper = mount.kill_under_stopped_keeper();
    let [recovery, neighbour] = [
        vec!["recover".as_ref(), backing.as_os_str()],
        vec!["mount".as_ref(), backing.as_os_str(), other.as_os_str()],
    ]
    .map(|args| {
        sandbox
            .firn(args)
            .stderr(Stdio::piped())
            .spawn()
            .expect("firn")
    });
    let end = |child: Child| {
        let output = child.wait_with_output().expect("wait");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{stderr}");
        assert_eq!(output.status.code(), Some(11), "{stderr}");
    };
    end(neighbour);
    mount.continue_keeper(keeper);
    // It may have waited for an answer of the mount.
    end(recovery);
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"held");
    fs::write(mount.join("file"), "more").expect("write");
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"more");
    // The locks end with the mount.
    FirnMount::new(&sandbox, &options).umount();
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
}

/// A tmpfs of its own, in place of a directory.
struct SmallMemory(PathBuf);

impl SmallMemory {
    fn over(dir: &Path, size: &str) -> Self {
        let options = format!("size={size},mode=0700");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(dir))
        .ok();
        Self(dir.to_owned())
    }

    /// Leaves no byte of it.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut filler = File::create(&path).expect("create");
        let block = vec![1; 4096];
        while filler.write_all(&block).is_ok() {}
        path
    }
}

impl Drop for SmallMemory {
    fn drop(&mut self) {
        firn_tests::sandbox::unmount_lazily(&self.0);
    }
}

/// Proves S-crash-1, S-crash-11.
#[test]
fn a_table_without_room_loses_open_files_to_their_programs_and_no_byte() {
    const FILES: usize = 1500;
    let sandbox = Sandbox::new("room");
    let memory = SmallMemory::over(sandbox.runtime(), "64M");
    let options = format!("{SMALL},takeover=auto,close=held,drain-age=10min");
    let mut mount = FirnMount::new(&sandbox, &options);
    let kept = File::create(mount.join("kept")).expect("create");
    kept.write_all_at(b"before", 0).expect("write");
    let filler = memory.fill();
    let create = |index| {
        let file = File::create(mount.join(format!("file{index}"))).expect("create");
        file.write_all_at(b"1", 0).expect("write");
        file
    };
    let files: Vec<File> = (0..FILES).map(create).collect();
    let lost = mount.status().live_table_lost;
    assert!(lost > 0, "the table found no room");
    mount.kill_and_go_on();
    kept.write_all_at(b"after!", 6)
        .expect("what is in the table goes on");
    let refused = files
        .iter()
        .filter(|file| file.write_all_at(b"2", 1).is_err());
    let refused = refused.count();
    assert!(refused > 0 && refused as u64 <= lost, "{refused} of {lost}");
    fs::remove_file(filler).expect("remove");
    let again = File::create(mount.join("new")).expect("what is opened now goes on");
    mount.kill_and_go_on();
    again.write_all_at(b"new", 0).expect("write");
    drop((files, kept, again));
    let backing = mount.umount();
    assert_eq!(
        fs::read(backing.join("kept")).expect("read"),
        b"beforeafter!"
    );
    for index in 0..FILES {
        let bytes = fs::read(backing.join(format!("file{index}"))).expect("read");
        assert!(bytes == b"1" || bytes == b"12", "file{index}: {bytes:?}");
    }
    println!("{lost} entries without room, {refused} of {FILES} open files lost");
}

/// The next firnd inherits the limits of the keeper.
fn limit_address_space(pid: u32, bytes: u64) {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: libc::RLIM_INFINITY,
    };
    let none = std::ptr::null_mut();
    // SAFETY: the call reads a limit, and writes nothing.
    let set = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_AS, &raw const limit, none) };
    assert_eq!(set, 0);
}

/// Proves S-crash-13.
#[test]
fn a_firnd_without_memory_is_tried_again_until_there_is_some() {
    let sandbox = Sandbox::new("memory");
    let mut mount = FirnMount::new(&sandbox, &taken_over());
    let file = File::create(mount.join("file")).expect("create");
    file.write_all_at(b"one", 0).expect("write");
    mount.wait_until_served_well();
    let (before, keeper) = (mount.pid(), keeper_of(mount.pid()).expect("a keeper"));
    // Enough to begin, and not for the address space of the live table.
    limit_address_space(keeper, 450_000_000);
    kill_alone(before, libc::SIGKILL);
    wait_until("one of them has failed", Duration::from_secs(60), || {
        sandbox.logs().contains("map the table of open files")
    });
    limit_address_space(keeper, libc::RLIM_INFINITY);
    file.write_all_at(b"two", 3).expect("programs wait");
    mount.note_takeover(before);
    assert_eq!(mount.status().lost_open_files, 0);
    drop(file);
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"onetwo");
}

/// A forced unmount is how an administrator ends a mount whose firnd would be started again.
#[test]
fn a_forced_unmount_ends_firnd_and_keeper_while_files_are_open() {
    let sandbox = Sandbox::new("forced");
    let mut mount = FirnMount::new(&sandbox, &taken_over());
    let file = File::create(mount.join("file")).expect("create");
    mount.kill_and_go_on();
    let (firnd, keeper) = (mount.pid(), keeper_of(mount.pid()).expect("a keeper"));
    file.write_all_at(b"kept", 0).expect("write");
    let args: [OsString; 3] = ["umount".into(), "--force".into(), mount.path().into()];
    sandbox.run(args);
    for pid in [firnd, keeper] {
        wait_until("it ends", Duration::from_secs(60), || {
            is_zombie(pid) || !Path::new("/proc").join(pid.to_string()).exists()
        });
    }
    assert!(!is_mounted(mount.path()));
    assert!(file.write_all_at(b"x", 0).is_err());
    drop(file);
    mount.abandon();
    let again = FirnMount::new(&sandbox, &taken_over());
    assert_eq!(fs::read(again.join("file")).expect("read"), b"kept");
    again.umount();
}

/// Proves S-crash-11.
#[test]
fn a_mount_that_holds_changes_until_a_commit_goes_on() {
    let sandbox = Sandbox::new("transactions");
    let options = format!("{SMALL},drain=commit,mode=buffer,takeover=auto");
    let mut mount = FirnMount::new(&sandbox, &options);
    assert_eq!(mount.status().takeover, "ready");
    let scope = mount.join("scope");
    fs::create_dir(&scope).expect("mkdir");
    firn(&sandbox, "begin", &scope).ok();
    fs::write(scope.join("kept"), "kept").expect("write");
    firn(&sandbox, "commit", &scope).ok();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(scope.join("kept"));
    let file = file.expect("open");
    for _ in 0..2 {
        mount.kill_and_go_on();
        assert_eq!(fs::read(scope.join("kept")).expect("read"), b"kept");
        file.write_all_at(b"kept", 0).expect("write on");
    }
    drop(file);
    mount.umount();
}

/// Proves S-crash-1.
#[test]
fn without_takeover_programs_get_errors() {
    let sandbox = Sandbox::new("without");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},takeover=no"));
    assert_eq!(keeper_of(mount.pid()), None);
    assert_ne!(mount.status().takeover, "ready");
    let file = File::create(mount.join("file")).expect("create");
    kill_alone(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    assert!(file.write_all_at(b"x", 0).is_err());
    drop(file);
    assert!(is_mounted(mount.path()));
}

/// A descriptor of a mapping goes on too: its pages are the kernel's.
///
/// Proves S-mmap-2.
#[test]
fn stores_to_a_shared_mapping_survive_the_kill() {
    let sandbox = Sandbox::new("mapping");
    let mut mount = FirnMount::new(&sandbox, &taken_over());
    let path = mount.join("mapped");
    fs::write(&path, vec![b'a'; 1 << 20]).expect("write");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .expect("open");
    let len = 1 << 20;
    // SAFETY: a fresh mapping of a file that has `len` bytes.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: the mapping has `len` bytes and is this test's alone.
    let bytes = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), len) };
    for step in 0..3usize {
        bytes[step * 4096] = b'0' + step as u8;
        mount.kill_and_go_on();
        bytes[step * 4096 + 1] = b'x';
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::msync(at, len, libc::MS_SYNC) }, 0);
    // SAFETY: nothing refers to the mapping any more.
    unsafe { libc::munmap(at, len) };
    drop(file);
    let backing = mount.umount();
    let written = fs::read(backing.join("mapped")).expect("read");
    for step in 0..3usize {
        assert_eq!(
            &written[step * 4096..step * 4096 + 3],
            &[b'0' + step as u8, b'x', b'a']
        );
    }
}
