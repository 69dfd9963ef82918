//! A backing whose calls do not return: what goes on, and how such a mount ends.
//!
//! The kernel keeps some calls of one directory apart by itself, here and in the file system of the test: so what
//! hangs has directories of its own, and what goes on another one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::Mapping;
use firn_tests::sandbox::{is_mounted, is_stopped, kill, wait_for_request};
use firn_tests::transaction::{firn, firn_with};
use firn_tests::watchdog::test_limit;
use firn_tests::{FirnMount, Sandbox, wait_until};
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::mm::MapFlags;

/// What a call needs to come to where it hangs.
const REACH_LIMIT: Duration = Duration::from_secs(60);
/// Programs that call for one file, and programs with a file of their own each.
const PROGRAMS: usize = 20;
/// What was looked up before is not looked up again: only what hangs is.
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,fuse-threads=2,attr-timeout=10min";

/// What programs do, and the operation of the server that hangs then.
struct Call {
    operation: &'static str,
    /// Before it hangs, in a directory with `file` in it.
    prepare: fn(&Path) -> io::Result<Option<File>>,
    act: fn(&Path, Option<File>) -> io::Result<()>,
    /// Calls of the server that hang at the same time, at least.
    reached: u64,
}

const FILE: &str = "file";

fn nothing(_: &Path) -> io::Result<Option<File>> {
    Ok(None)
}

fn opened(dir: &Path) -> io::Result<Option<File>> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(dir.join(FILE))
        .map(Some)
}

/// One copy after the other at first: Linux 6.18 asks for a newer kind, which the server does not know, and takes two
/// refusals at once for one of the older kind too.
fn copied(dir: &Path) -> io::Result<Option<File>> {
    let file = of(opened(dir)?);
    copy(&file)?;
    Ok(Some(file))
}

fn copy(file: &File) -> io::Result<()> {
    let mut from = 0;
    let mut to = 1000;
    Ok(rustix::fs::copy_file_range(file, Some(&mut from), file, Some(&mut to), 10).map(drop)?)
}

fn of(file: Option<File>) -> File {
    file.expect("it was opened before")
}

/// A name of this thread's own.
fn own_name(dir: &Path) -> PathBuf {
    dir.join(format!("{:?}", std::thread::current().id()))
}

fn calls() -> Vec<Call> {
    let each = PROGRAMS as u64;
    let call = |operation, prepare, act, reached| Call {
        operation,
        prepare,
        act,
        reached,
    };
    vec![
        call(
            "lookup",
            nothing,
            |dir, _| fs::symlink_metadata(dir.join(FILE)).map(drop),
            each,
        ),
        call(
            "getattr",
            nothing,
            |dir, _| fs::symlink_metadata(dir.join(FILE)).map(drop),
            each,
        ),
        call(
            "open",
            nothing,
            |dir, _| File::open(dir.join(FILE)).map(drop),
            each,
        ),
        call(
            "create",
            nothing,
            |dir, _| File::create_new(own_name(dir)).map(drop),
            each,
        ),
        call(
            "read",
            opened,
            |_, file| of(file).read_at(&mut [0; 10], 0).map(drop),
            each,
        ),
        // A close waits for its drain, and one file has fewer drains under way than there are threads for them.
        call(
            "write",
            opened,
            |_, file| of(file).write_at(b"new", 0).map(drop),
            1,
        ),
        call("fsync", opened, |_, file| of(file).sync_all(), each),
        call(
            "setattr",
            nothing,
            |dir, _| fs::set_permissions(dir.join(FILE), fs::Permissions::from_mode(0o600)),
            each,
        ),
        call("setattr", opened, |_, file| of(file).set_len(10), each),
        call(
            "unlink",
            nothing,
            |dir, _| fs::remove_file(dir.join(FILE)),
            each,
        ),
        call(
            "rename",
            nothing,
            |dir, _| fs::rename(dir.join(FILE), dir.join("moved")),
            each,
        ),
        call(
            "mkdir",
            nothing,
            |dir, _| fs::create_dir(own_name(dir)),
            each,
        ),
        call(
            "symlink",
            nothing,
            |dir, _| symlink("target", own_name(dir)),
            each,
        ),
        call(
            "link",
            nothing,
            |dir, _| fs::hard_link(dir.join(FILE), own_name(dir)),
            each,
        ),
        call(
            "readdir",
            nothing,
            |dir, _| fs::read_dir(dir)?.try_for_each(|entry| entry.map(drop)),
            each,
        ),
        call(
            "statfs",
            nothing,
            |dir, _| Ok(rustix::fs::statfs(dir).map(drop)?),
            each / 2,
        ),
        call("copy_file_range", copied, |_, file| copy(&of(file)), each),
        call(
            "fallocate",
            opened,
            |_, file| {
                Ok(rustix::fs::fallocate(
                    of(file),
                    FallocateFlags::empty(),
                    0,
                    1 << 20,
                )?)
            },
            each,
        ),
        call(
            "lseek",
            opened,
            |_, file| Ok(rustix::fs::seek(of(file), SeekFrom::Data(0)).map(drop)?),
            each,
        ),
        call(
            "getxattr",
            nothing,
            |dir, _| match rustix::fs::getxattr(dir.join(FILE), "user.x", &mut [0; 8][..]) {
                Err(rustix::io::Errno::NODATA) => Ok(()),
                other => Ok(other.map(drop)?),
            },
            each,
        ),
        // Only firnd waits for it.
        call(
            "flush",
            opened,
            |_, file| {
                drop(file);
                Ok(())
            },
            1,
        ),
    ]
}

/// A program: a thread, and whether its call must succeed.
type Program = (bool, JoinHandle<io::Result<()>>);

/// Makes directories whose names begin with `name`, in which the programs of [`start`] work.
fn directories(source: &Path, name: &str) -> Vec<PathBuf> {
    let own = (0..PROGRAMS).map(|program| PathBuf::from(format!("{name}-{program}")));
    let all: Vec<_> = own.chain([PathBuf::from(name)]).collect();
    for dir in &all {
        fs::create_dir(source.join(dir)).expect("mkdir in the source");
        fs::write(source.join(dir).join(FILE), [b'x'; 5000]).expect("a file in the source");
    }
    all
}

/// Starts the programs, of which half call for one file; what they need before is done when it returns.
fn start(mount: &FirnMount, dirs: &[PathBuf], call: &Call, hang: impl FnOnce()) -> Vec<Program> {
    let (shared, own) = dirs.split_last().expect("directories");
    let shared = std::iter::repeat_n((false, shared), PROGRAMS);
    let places = own.iter().map(|dir| (true, dir)).chain(shared);
    let prepared: Vec<_> = places
        .map(|(alone, dir)| {
            let dir = mount.join(dir);
            fs::metadata(&dir).expect("stat of a directory");
            let file =
                (call.prepare)(&dir).unwrap_or_else(|error| panic!("{}: {error}", call.operation));
            (alone, dir, file)
        })
        .collect();
    hang();
    let act = call.act;
    let operation = call.operation;
    let begin = |(alone, dir, file): (bool, PathBuf, Option<File>)| {
        let program = move || {
            let tell = |error: &io::Error| println!("{operation} in {}: {error}", dir.display());
            act(&dir, file).inspect_err(tell)
        };
        (alone, std::thread::spawn(program))
    };
    prepared.into_iter().map(begin).collect()
}

/// What programs do with other files.
fn everything_else(dir: &Path) {
    let path = dir.join("new");
    let moved = dir.join("moved");
    let mut file = File::create_new(&path).expect("create");
    file.write_all(&[7; 100_000]).expect("write");
    file.sync_all().expect("fsync");
    drop(file);
    assert_eq!(fs::metadata(&path).expect("stat").len(), 100_000);
    assert_eq!(fs::read(&path).expect("open and read"), [7; 100_000]);
    let old = OpenOptions::new()
        .read(true)
        .write(true)
        .open(dir.join(FILE))
        .expect("open");
    old.write_all_at(b"begins", 0).expect("write");
    let mut bytes = [0; 10];
    old.read_exact_at(&mut bytes, 0).expect("read");
    assert_eq!(&bytes, b"beginsxxxx");
    let mapping = Mapping::new(&old, 10, MapFlags::PRIVATE).expect("map");
    assert_eq!(mapping.read(0, 10), bytes);
    drop(mapping);
    old.set_len(4000).expect("truncate");
    drop(old);
    fs::rename(&path, &moved).expect("rename");
    fs::set_permissions(&moved, fs::Permissions::from_mode(0o640)).expect("chmod");
    fs::remove_file(&moved).expect("unlink");
    fs::create_dir(&path).expect("mkdir");
    assert_eq!(fs::read_dir(dir).expect("readdir").count(), 2);
    fs::remove_dir(&path).expect("rmdir");
    fs::write(dir.join(FILE), [b'x'; 5000]).expect("truncate, write, close");
}

/// Proves S-error-11.
#[test]
fn regression_programs_that_hang_stop_nobody_else() {
    let sandbox = Sandbox::new("hangs");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    let mount = FirnMount::over(&sandbox, fault.path(), OPTIONS);
    fs::create_dir(fault.source().join("other")).expect("mkdir in the source");
    fs::write(fault.source().join("other").join(FILE), [b'x'; 5000]).expect("a file in the source");
    for (number, call) in calls().iter().enumerate() {
        let operation = call.operation;
        let name = format!("hung-{number}-{operation}");
        let mut dirs = directories(fault.source(), &name);
        if operation == "write" {
            dirs = vec![dirs.pop().expect("the directory of all")];
        }
        let path = if operation == "statfs" { "" } else { &name };
        let programs = start(&mount, &dirs, call, || fault.hang(operation, path));
        wait_until(&format!("{operation} hangs"), REACH_LIMIT, || {
            fault.hung_count() >= call.reached
        });
        everything_else(&mount.join("other"));
        let asked = Instant::now();
        let status = mount.status();
        let told = asked.elapsed();
        let hung = fault.hung_count();
        println!(
            "{operation}: {hung} calls hang, {} bytes are held, status after {told:?}",
            status.held_bytes
        );
        fault.let_go();
        for (alone, program) in programs {
            let result = program.join().expect("a program");
            assert!(!alone || result.is_ok(), "{operation}: {result:?}");
        }
    }
    mount.umount();
    assert_eq!(
        fs::read(fault.source().join("other").join(FILE)).expect("read"),
        [b'x'; 5000]
    );
}

/// Calls of many files that hang, with many programs each: what [`everything_else`] does goes on beside them.
fn hang_many_files(
    sandbox: &Sandbox,
    fault: &FaultFs,
    operation: &str,
    options: &str,
    act: fn(&File, usize) -> io::Result<()>,
) {
    /// As many as S-error-11 promises.
    const FILES: usize = 500;
    /// More callers than firnd has threads for them: 500 x 4 > 1,600.
    const CALLERS_OF_A_FILE: usize = 4;
    /// Files with enough more callers that these alone would fill the threads: 50 x 40 > 1,600.
    const FILES_IN_DEMAND: usize = 50;
    const CALLERS_OF_A_FILE_IN_DEMAND: usize = 40;
    let mount = FirnMount::over(sandbox, fault.path(), options);
    let open = |file| {
        let path = mount.join(format!("hung/{file}"));
        Arc::new(File::open(path).expect("open"))
    };
    let files: Vec<_> = (0..FILES).map(open).collect();
    fault.hang(operation, "hung/");
    let mut programs = Vec::new();
    let mut start = |file: &Arc<File>, callers| {
        for caller in 0..callers {
            let file = Arc::clone(file);
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            programs.push(thread.spawn(move || act(&file, caller)).expect("a thread"));
        }
    };
    // Those with many callers come first, when all threads of firnd are free.
    for file in &files[..FILES_IN_DEMAND] {
        start(file, CALLERS_OF_A_FILE_IN_DEMAND);
    }
    for file in &files {
        start(file, CALLERS_OF_A_FILE);
    }
    wait_until("each file has a call that hangs", REACH_LIMIT, || {
        fault.hung_count() >= FILES as u64
    });
    everything_else(&mount.join("other"));
    let asked = Instant::now();
    mount.status();
    println!(
        "{operation}: {} programs call, {} calls hang, status after {:?}",
        programs.len(),
        fault.hung_count(),
        asked.elapsed()
    );
    fault.let_go();
    for program in programs {
        program.join().expect("a program").expect("its call");
    }
    drop(files);
    mount.umount();
}

/// Proves S-error-11.
#[test]
fn regression_many_files_that_hang_with_many_programs_each_stop_no_others() {
    let sandbox = Sandbox::new("hangsmany");
    let fault = FaultFs::with_hung_max(&sandbox, 700);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    for dir in ["hung", "other"] {
        fs::create_dir(fault.source().join(dir)).expect("mkdir in the source");
    }
    fs::write(fault.source().join("other").join(FILE), [b'x'; 5000]).expect("a file in the source");
    for file in 0..500 {
        let path = fault.source().join("hung").join(file.to_string());
        let file = File::create_new(path).expect("a file in the source");
        file.set_len(4 << 20).expect("a hole");
    }
    hang_many_files(
        &sandbox,
        &fault,
        "getxattr",
        OPTIONS,
        |file, _| match rustix::fs::fgetxattr(file, "user.x", &mut [0; 8][..]) {
            Err(rustix::io::Errno::NODATA) => Ok(()),
            other => Ok(other.map(drop)?),
        },
    );
    // The kernel reads pages of mappings in the background, and limits the number of such requests of a mount.
    let options = format!("{OPTIONS},passthrough=off");
    hang_many_files(&sandbox, &fault, "read", &options, |file, caller| {
        let mapping = Mapping::new(file, 4 << 20, MapFlags::PRIVATE)?;
        assert_eq!(mapping.read((caller % 4) << 20, 1), [0]);
        Ok(())
    });
}

/// Proves S-error-11, S-error-22.
#[test]
fn regression_a_server_that_answers_nothing_stops_no_write_to_memory() {
    /// More than there may be calls of the backing at a time.
    const MANY: usize = 700;
    let sandbox = Sandbox::new("hangsall");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    for program in 0..MANY {
        fs::write(fault.source().join(program.to_string()), "").expect("a file in the source");
    }
    let options = format!("{OPTIONS},close=held,drain-age=10min");
    let mount = FirnMount::over(&sandbox, fault.path(), &options);
    let path = mount.join("held");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .expect("create");
    file.write_all_at(b"before", 0).expect("write");
    fault.hang("lookup", "");
    let top = mount.path().to_owned();
    let programs: Vec<_> = (0..MANY)
        .map(|program| {
            let path = top.join(program.to_string());
            std::thread::spawn(move || fs::symlink_metadata(path).map(drop))
        })
        .collect();
    // As many as the server has threads.
    wait_until("look-ups hang", REACH_LIMIT, || fault.hung_count() >= 100);
    fault.stall();
    for chunk in 0..100 {
        file.write_all_at(&[9; 100_000], 6 + chunk * 100_000)
            .expect("write");
    }
    let asked = Instant::now();
    let status = mount.status();
    println!(
        "{} bytes are held, status after {:?}",
        status.held_bytes,
        asked.elapsed()
    );
    assert_eq!(status.held_bytes, 10_000_006);
    fault.go_on();
    fault.let_go();
    for program in programs {
        program.join().expect("a program").expect("stat");
    }
    let mut bytes = vec![0; 10_000_006];
    file.read_exact_at(&mut bytes, 0).expect("read");
    assert!(bytes.starts_with(b"before") && bytes[6..].iter().all(|byte| *byte == 9));
    drop(file);
    mount.umount();
    assert_eq!(fs::read(fault.source().join("held")).expect("read"), bytes);
}

/// Ends a mount by force while programs hang in a call, and looks for what was held then.
fn end_by_force(number: usize, call: &Call) {
    let operation = call.operation;
    let sandbox = Sandbox::new("hangsforce");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    let name = format!("hung-{number}-{operation}");
    let mut dirs = directories(fault.source(), &name);
    if operation == "write" {
        dirs = vec![dirs.pop().expect("the directory of all")];
    }
    let options = format!("{OPTIONS},close=held,drain-age=10min");
    let mount = FirnMount::over(&sandbox, fault.path(), &options);
    fs::create_dir(mount.join("other")).expect("mkdir");
    fs::write(mount.join("other/held"), [5; 100_000]).expect("write");
    let file = if operation == "write" { "" } else { &name };
    let programs = start(&mount, &dirs, call, || fault.hang(operation, file));
    let umount = [
        "umount".as_ref(),
        "--force".as_ref(),
        mount.path().as_os_str(),
    ];
    if operation != "write" {
        wait_until(&format!("{operation} hangs"), REACH_LIMIT, || {
            fault.hung_count() >= call.reached
        });
    }
    let asked = Instant::now();
    let outcome = sandbox.run(umount);
    println!(
        "{operation}: ended with {} after {:?}: {}",
        outcome.code,
        asked.elapsed(),
        outcome.stderr.trim()
    );
    assert!([0, 3].contains(&outcome.code), "{operation}: {outcome}");
    assert!(
        !is_mounted(mount.path()),
        "{operation}: it is still mounted"
    );
    assert!(
        operation != "write" || sandbox.arenas().len() == 1,
        "the arena is kept"
    );
    fault.let_go();
    mount.wait_for_end();
    for (_, program) in programs {
        let _ = program.join().expect("a program");
    }
    if !sandbox.arenas().is_empty() {
        sandbox
            .run(["recover".as_ref(), mount.backing().as_os_str()])
            .ok();
    }
    assert_eq!(
        fs::read(fault.source().join("other/held")).expect("read"),
        [5; 100_000],
        "{operation}"
    );
}

/// Proves S-error-5, S-error-12, S-error-14.
#[test]
fn regression_a_forced_end_does_not_wait_for_a_backing_that_hangs() {
    let wanted = ["lookup", "create", "write", "unlink", "flush"];
    let calls = calls();
    let wanted = calls
        .iter()
        .enumerate()
        .filter(|(_, call)| wanted.contains(&call.operation));
    std::thread::scope(|scope| {
        let runs: Vec<_> = wanted
            .map(|(number, call)| scope.spawn(move || end_by_force(number, call)))
            .collect();
        for run in runs {
            run.join().expect("a forced end");
        }
    });
}

/// Proves S-error-12, S-log-14.
#[test]
fn regression_a_forced_end_says_that_files_stay_in_logs() {
    let sandbox = Sandbox::new("hangslogs");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    let options = "arena-size=64M,chunk-size=1M,layout=log,flatten=demand";
    let mount = FirnMount::over(&sandbox, fault.path(), options);
    let bytes = [7; 100_000];
    let shared = mount.join("shared");
    fs::write(&shared, bytes).expect("write");
    mount.wait("logged", &shared).ok();
    // The end of the mount writes the bytes of the logs to the plain file.
    fault.hang("write", "shared");
    let point = mount.path().as_os_str();
    let outcome = sandbox.run(["umount".as_ref(), "--force".as_ref(), point]);
    println!("ended with {}: {}", outcome.code, outcome.stderr.trim());
    assert_eq!(outcome.code, 3, "{outcome}");
    assert!(outcome.stderr.contains("files stay in logs"), "{outcome}");
    fault.let_go();
    mount.wait_for_end();
    FirnMount::over(&sandbox, fault.path(), options).umount();
    let plain = fs::read(fault.source().join("shared"));
    assert_eq!(plain.expect("read"), bytes);
}

/// Proves S-error-12.
#[test]
fn regression_a_stub_tree_whose_names_hang_is_ended_by_force() {
    let sandbox = Sandbox::new("hangsstub");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    let options = "arena-size=64M,chunk-size=1M,frontend=preload";
    let mount = FirnMount::over(&sandbox, fault.path(), options);
    fault.hang("mkdir", "dir");
    // Names are synced each second, without the preload library too.
    fs::create_dir(mount.join("dir")).expect("mkdir in the tree");
    wait_until("mkdir hangs", REACH_LIMIT, || fault.hung_count() >= 1);
    let asked = Instant::now();
    mount.status();
    println!("status after {:?}", asked.elapsed());
    // An ordinary one waits for the names; the other one does not, and is answered, though the ordinary one is told
    // of it at the same time.
    let mut patient = sandbox
        .firn(["umount".as_ref(), mount.path().as_os_str()])
        .spawn()
        .expect("firn umount");
    wait_until("the ordinary one waits", REACH_LIMIT, || {
        mount.threads().iter().any(|name| name == "firn-end")
    });
    let outcome = sandbox.run([
        "umount".as_ref(),
        "--force".as_ref(),
        mount.path().as_os_str(),
    ]);
    println!(
        "ended with {} after {:?}: {}",
        outcome.code,
        asked.elapsed(),
        outcome.stderr.trim()
    );
    assert!([0, 3].contains(&outcome.code), "{outcome}");
    fault.let_go();
    mount.wait_for_end();
    // It was told of the forced one, or waited for the end of firnd.
    patient.wait().expect("the other one");
    let mount = FirnMount::over(&sandbox, fault.path(), options);
    assert!(mount.join("dir").is_dir(), "the tree is kept");
    mount.umount();
    assert!(
        fault.source().join("dir").is_dir(),
        "its names are in the backing"
    );
}

/// A step of a transaction that hangs.
struct TransactionStep {
    verb: &'static str,
    more: &'static [&'static str],
    /// It is done in a transaction.
    is_begun: bool,
    /// The operation of the server, and for which paths.
    hangs: (&'static str, &'static str),
}

const TRANSACTION_STEPS: [TransactionStep; 5] = [
    TransactionStep {
        verb: "begin",
        more: &[],
        is_begun: false,
        hangs: ("write", "scope/file"),
    },
    TransactionStep {
        verb: "prepare",
        more: &["--id", "7"],
        is_begun: true,
        hangs: ("write", ".firn/tx-1/new"),
    },
    TransactionStep {
        verb: "prepare",
        more: &["--id", "7"],
        is_begun: true,
        hangs: ("write", ".firn/tx-1/record"),
    },
    TransactionStep {
        verb: "commit",
        more: &[],
        is_begun: true,
        hangs: ("write", ".firn/tx-1/record"),
    },
    TransactionStep {
        verb: "abort",
        more: &[],
        is_begun: true,
        hangs: ("unlink", ".firn/tx-1"),
    },
];

/// Writes a byte in a thread, and returns when that waits for an answer.
fn write_that_waits(file: File) -> JoinHandle<io::Result<()>> {
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid()).expect("send");
        file.write_all_at(b"!", 0)
    });
    let number = told.recv().expect("the number of the thread");
    let number = number.as_raw_nonzero();
    wait_for_request(Path::new(&format!("/proc/self/task/{number}")));
    thread
}

/// Proves S-tx-120, S-tx-122.
#[test]
fn a_transaction_that_hangs_stops_no_change_in_another_directory() {
    for (number, step) in TRANSACTION_STEPS.iter().enumerate() {
        let told = format!("{} at {:?}", step.verb, step.hangs);
        let sandbox = Sandbox::new(&format!("txhangs{number}"));
        let fault = FaultFs::new(&sandbox);
        let _watchdog = fault.watchdog(test_limit() * 3 / 4);
        let mount = FirnMount::over(&sandbox, fault.path(), &format!("{OPTIONS},drain=commit"));
        for dir in ["scope", "other"] {
            fs::create_dir(fault.source().join(dir)).expect("mkdir in the source");
            let file = fault.source().join(dir).join(FILE);
            fs::write(file, [b'x'; 5000]).expect("a file in the source");
        }
        let scope = mount.join("scope");
        let open = |path: PathBuf| OpenOptions::new().write(true).open(path).expect("open");
        if step.is_begun {
            firn(&sandbox, "begin", &scope).ok();
            // More than an inline change has.
            open(scope.join(FILE))
                .write_all_at(&[1; 100_000], 0)
                .expect("write");
        }
        let inside = open(scope.join(FILE));
        fs::write(mount.join("other/nameless"), b"text").expect("write");
        let nameless = open(mount.join("other/nameless"));
        fs::remove_file(mount.join("other/nameless")).expect("unlink");
        let (operation, path) = step.hangs;
        fault.hang(operation, path);
        if !step.is_begun {
            inside.write_all_at(&[1; 100_000], 0).expect("write");
        }
        std::thread::scope(|threads| {
            let run = threads.spawn(|| firn_with(&sandbox, step.verb, &scope, step.more));
            wait_until(&told, REACH_LIMIT, || fault.hung_count() > 0);
            let waiting = [write_that_waits(inside), write_that_waits(nameless)];
            everything_else(&mount.join("other"));
            for thread in &waiting {
                assert!(!thread.is_finished(), "{told}: it waits for the step");
            }
            fault.let_go();
            run.join().expect("join").ok();
            for thread in waiting {
                thread.join().expect("join").expect("it goes on");
            }
        });
        if step.verb == "prepare" || step.verb == "begin" {
            firn(&sandbox, "commit", &scope).ok();
        }
        mount.umount();
    }
}

/// Proves S-error-12.
#[test]
fn regression_an_unmount_does_not_wait_for_an_exec_that_another_mount_holds_up() {
    let sandbox = Sandbox::new("hangs-exec");
    let hung = FirnMount::new(&sandbox, "takeover=no");
    let other_sandbox = Sandbox::new("hangs-other");
    let other = FirnMount::new(&other_sandbox, "takeover=no");
    // Python opens each file with O_CLOEXEC, so the exec closes it, and waits for the answer.
    let program = "
import os, sys
file = open('file', 'w')
print('ready', flush=True)
sys.stdin.readline()
os.execv('/bin/true', ['true'])
";
    let mut command = Command::new("python3");
    command.args(["-c", program]).current_dir(hung.path());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("start python3");
    let mut answer = [0; 6];
    let mut output = child.stdout.take().expect("piped");
    output.read_exact(&mut answer).expect("ready");
    kill(hung.pid(), libc::SIGSTOP);
    for thread in fs::read_dir(format!("/proc/{}/task", hung.pid())).expect("a process") {
        let thread = thread.expect("a thread").path();
        wait_until("firnd is stopped", REACH_LIMIT, || is_stopped(&thread));
    }
    drop(child.stdin.take());
    // The new program has no arguments before the exec is done.
    wait_until("the exec waits", REACH_LIMIT, || {
        let arguments = fs::read(format!("/proc/{}/cmdline", child.id()));
        arguments.is_ok_and(|arguments| arguments.is_empty())
    });
    // `stat` of the process would wait for the exec too.
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("read");
    assert!(!status.contains("State:\tZ"), "the exec did not wait");
    other.umount();
    kill(hung.pid(), libc::SIGCONT);
    assert!(child.wait().expect("wait").success());
}
