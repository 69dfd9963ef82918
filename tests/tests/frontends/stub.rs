//! Stub trees: unmodified programs under the preload library where there is no FUSE, and what is in the backing
//! afterwards. What mounts do as well is in `frontends.rs`.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_tests::ack::verify;
use firn_tests::command::{copy_program, wait_child};
use firn_tests::data_socket::{pester, token_of_tree};
use firn_tests::fsops::read;
use firn_tests::mount::{SMALL, mount_args, patient};
use firn_tests::preloaded::{Frontend, compile, python, shell, stubs_with_bytes};
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::sandbox::{firn_binary, is_mounted, kill, preload_library, unmount_lazily};
use firn_tests::{FirnMount, Sandbox, helper_binary, run, seed, wait_until};
use rand::RngExt;

/// Where programs of these tests are compiled to.
fn target_dir() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// A tree at the sandbox's `mnt`: root's own tmpfs.
fn tree<'a>(sandbox: &'a Sandbox, options: &str) -> FirnMount<'a> {
    Frontend::Tree.mount(sandbox, options)
}

/// Puts the library before a program that finds the sandbox's tree.
fn preload<'c>(sandbox: &Sandbox, command: &'c mut Command) -> &'c mut Command {
    Frontend::Tree.preload(sandbox, command)
}

/// Output of a program whose standard descriptors are stubs: stdio and streams of C++ write them unseen.
#[test]
fn printf_and_cout_go_to_a_redirected_stub() {
    let program = compile("c++", "redirected.cpp", target_dir());
    let script = "unset FIRN_PRELOAD_REPORT; \"$PROGRAM\" > out 2> err; \"$PROGRAM\" >> out; \"$PROGRAM\" < out | cat > piped; wc -l < out";
    Frontend::Tree.same_as_plain("stub-cout", &patient(""), |dir| {
        let mut command = shell(script, dir);
        command.env("PROGRAM", &program);
        command
    });
}

/// Proves S-stub-8.
#[test]
fn calls_that_move_bytes_in_the_kernel_fail_and_programs_copy() {
    let sandbox = Sandbox::new("stub-move");
    let mount = tree(&sandbox, &patient(""));
    let script = "import errno, os, shutil, sys; os.chdir(sys.argv[1])
open('from', 'wb').write(bytes(range(256)) * 3000)
a, b = os.open('from', os.O_RDONLY), os.open('to', os.O_CREAT | os.O_RDWR)
for call, expected in [(lambda: os.sendfile(b, a, 0, 100), errno.EINVAL),
                       (lambda: os.copy_file_range(a, b, 100), errno.EXDEV)]:
    try: call(); sys.exit('done')
    except OSError as e: assert e.errno == expected, e
assert os.lseek(a, 5, os.SEEK_DATA) == 5 and os.lseek(a, 5, os.SEEK_HOLE) == 768000
shutil.copy2('from', 'copied'); os.system('cp from cp; cat from > cat; dd if=from of=dd bs=7k status=none')
for name in 'copied', 'cp', 'cat', 'dd': assert open(name, 'rb').read() == open('from', 'rb').read(), name";
    run(preload(&sandbox, &mut python(script, mount.path()))).ok();
    assert_eq!(stubs_with_bytes(mount.path()), [] as [PathBuf; 0]);
    let backing = mount.umount();
    assert_eq!(read(&backing.join("copied")), read(&backing.join("from")));
}

// ---- names ---------------------------------------------------------------------------------------

/// Proves S-stub-2, S-stub-3.
#[test]
fn names_follow_the_tree_when_they_are_asked_for() {
    let sandbox = Sandbox::new("stub-names");
    let mount = tree(&sandbox, &patient("drain=demand"));
    let write = |script: &str| run(preload(&sandbox, &mut shell(script, mount.path()))).ok();
    write("mkdir step.tmp; echo data > step.tmp/rank0; echo more > step.tmp/rank1");
    let backing = mount.backing().to_owned();
    assert!(!backing.join("step.tmp").exists(), "synced unasked");
    fs::rename(mount.join("step.tmp"), mount.join("step")).expect("rename");
    let drain =
        |path: PathBuf| sandbox.run([OsString::from("drain"), "--wait".into(), path.into()]);
    drain(mount.join("step")).ok();
    assert_eq!(read(&backing.join("step/rank0")), b"data\n");
    assert!(!backing.join("step.tmp").exists());
    write("mv step/rank1 moved; rm step/rank0; chmod 600 moved; touch -d 2001-02-03 moved");
    drain(mount.path().to_owned()).ok();
    let meta = backing.join("moved").metadata().expect("moved");
    assert_eq!(
        (
            meta.len(),
            meta.mode() & 0o777,
            meta.mtime() < 1_000_000_000
        ),
        (5, 0o600, true)
    );
    assert_eq!(fs::read_dir(backing.join("step")).expect("step").count(), 0);
    drain(mount.join("missing")).code(1).says("no such file");
    mount.umount();
}

/// Proves S-stub-11.
#[test]
fn a_close_and_an_fsync_bring_the_name_along() {
    let sandbox = Sandbox::new("stub-close");
    let mount = tree(&sandbox, "arena-size=16M,close=drain");
    let mut command = shell(
        "mkdir -p a/b; echo data > a/b/file; cat \"$BACKING\"/a/b/file",
        mount.path(),
    );
    let closed = run(preload(&sandbox, &mut command).env("BACKING", mount.backing())).ok();
    assert_eq!(closed.stdout, "data\n");
    mount.umount();
    let mount = tree(&sandbox, &patient("drain=demand"));
    let script = "import os, sys; os.chdir(sys.argv[1]); os.mkdir('c'); f = os.open('c/file', os.O_CREAT | os.O_WRONLY)
os.write(f, b'synced'); os.fsync(f); assert open(sys.argv[2] + '/c/file', 'rb').read() == b'synced'";
    run(preload(
        &sandbox,
        python(script, mount.path()).arg(mount.backing()),
    ))
    .ok();
    mount.umount();
}

/// The kernel's clock has ticks of some milliseconds.
///
/// Proves S-stub-2.
#[test]
fn regression_a_write_right_after_utime_counts() {
    let sandbox = Sandbox::new("stub-tick");
    let mount = tree(&sandbox, &patient("drain=demand"));
    let script = "import os, sys; os.chdir(sys.argv[1])
for i in range(300):
    f = os.open(str(i), os.O_CREAT | os.O_WRONLY); os.write(f, b'1' * 5000)
    os.utime(str(i), (1000000000, 1000000000)); os.write(f, b'2' * 5000); os.close(f)";
    run(preload(&sandbox, &mut python(script, mount.path()))).ok();
    let backing = mount.umount();
    let old = (0..300).filter(|i| {
        backing
            .join(i.to_string())
            .metadata()
            .expect("a file")
            .mtime()
            == 1_000_000_000
    });
    assert_eq!(
        old.collect::<Vec<_>>(),
        [] as [i32; 0],
        "they were written to after that time was set"
    );
}

/// Proves S-stub-3, S-stub-12.
#[test]
fn a_file_removed_while_it_is_open_is_read_and_written_until_the_last_close() {
    let sandbox = Sandbox::new("stub-unlink");
    let mount = tree(&sandbox, &patient("drain=demand"));
    let script = "import os, subprocess, sys; os.chdir(sys.argv[1]); f = os.open('x', os.O_CREAT | os.O_RDWR)
os.write(f, b'a' * 100000); g = os.open('x', os.O_RDONLY); os.unlink('x')
open('x', 'w').write('another'); subprocess.run([sys.argv[2], 'drain', '--wait', '.'], check=True)
os.write(f, b'b' * 10); assert os.fstat(f).st_size == 100010 and os.fstat(f).st_nlink == 0
assert os.pread(g, 20, 99990) == b'a' * 10 + b'b' * 10; os.close(f)
assert os.read(g, 5) == b'aaaaa' and open('x').read() == 'another'";
    run(preload(
        &sandbox,
        python(script, mount.path()).arg(firn_binary()),
    ))
    .ok();
    let backing = mount.umount();
    assert_eq!(read(&backing.join("x")), b"another");
    assert_eq!(fs::read_dir(&backing).expect("the backing").count(), 1);
}

/// Proves S-stub-3, S-stub-12: rotating checkpoints with rm must not fill the memory.
#[test]
fn removed_files_give_their_memory_back() {
    let sandbox = Sandbox::new("stub-rotate");
    let mount = tree(&sandbox, "arena-size=16M,chunk-size=1M,drain=demand");
    let script = "for i in $(seq 8); do head -c 6000000 /dev/zero > step.$i; [ $i -lt 2 ] || rm step.$((i-1)); done";
    run(preload(&sandbox, &mut shell(script, mount.path()))).ok();
    let script = "head -c 30000000 /dev/zero > toomuch";
    run(preload(&sandbox, &mut shell(script, mount.path())))
        .code(1)
        .says("No space left");
    mount.umount();
}

/// Proves S-stub-3, S-stub-12: no program asks for names, and no writer for room.
#[test]
fn regression_memory_of_removed_files_is_free_soon() {
    let sandbox = Sandbox::new("stub-removed");
    let mount = tree(&sandbox, &patient("drain=demand"));
    let script = "mkdir d; for i in 1 2 3; do head -c 1000000 /dev/zero > d/$i; done; head -c 500000 /dev/zero > kept";
    run(preload(&sandbox, &mut shell(script, mount.path()))).ok();
    let status = mount.status();
    assert_eq!((status.held_bytes, status.held_files), (3_500_000, 4));
    // By the kernel alone, and one of them in the instant after others.
    fs::remove_file(mount.join("d/1")).expect("remove");
    fs::rename(mount.join("d/2"), mount.join("d/3")).expect("rename over");
    wait_until("the memory is free", Duration::from_secs(20), || {
        mount.status().held_bytes == 1_500_000
    });
    let script = "import os, sys, time; f = os.open(sys.argv[1] + '/d/3', os.O_RDONLY); os.unlink(sys.argv[1] + '/d/3')
sys.stdin.readline(); assert len(os.pread(f, 2000000, 0)) == 1000000; os.close(f); sys.stdin.readline()";
    let mut reader = preload(&sandbox, &mut python(script, mount.path()))
        .stdin(Stdio::piped())
        .spawn()
        .expect("python");
    wait_until("it is removed", Duration::from_secs(20), || {
        !mount.join("d/3").exists()
    });
    let mut input = reader.stdin.take().expect("piped");
    let before = mount.status();
    fs::remove_file(mount.join("kept")).expect("remove");
    wait_until(
        "the other's memory is free",
        Duration::from_secs(20),
        || mount.status().held_bytes == 1_000_000,
    );
    assert_eq!(before.held_bytes, 1_500_000, "a file that is open");
    std::io::Write::write_all(&mut input, b"read\n").expect("write");
    wait_until("the last close", Duration::from_secs(20), || {
        mount.status().held_bytes == 0
    });
    wait_until("nothing of it is in use", Duration::from_secs(20), || {
        mount.status().arena_used_bytes == 0
    });
    drop(input);
    assert_eq!(
        wait_child(&mut reader, Duration::from_secs(20)).and_then(|status| status.code()),
        Some(0)
    );
    mount.umount();
}

/// `firn ls` of a tree and of a mount: sizes, and the bytes that are held.
#[test]
fn regression_ls_tells_sizes_and_held_bytes_of_a_tree_as_of_a_mount() {
    for frontend in ["frontend=preload", "frontend=fuse"] {
        let sandbox = Sandbox::new("stub-ls");
        fs::write(sandbox.join("backing/old"), b"0123456789").expect("write");
        let mount = FirnMount::new(&sandbox, &patient(&format!("drain=demand,{frontend}")));
        let script = "printf abc > new; mkdir d; head -c 5000 /dev/zero > d/half; \"$0\" drain --wait d; printf abcde >> d/half; printf xyz >> old";
        let mut command = Command::new("bash");
        command
            .args(["-euc", script])
            .arg(firn_binary())
            .current_dir(mount.path());
        run(preload(&sandbox, &mut command)).ok();
        let run = |json: &[&str]| {
            let args = json
                .iter()
                .map(std::ffi::OsStr::new)
                .chain([mount.path().as_os_str()]);
            sandbox.run(["ls".as_ref()].into_iter().chain(args)).ok()
        };
        let listed = run(&["--json"]).json();
        let row = |file: &serde_json::Value| {
            let number = |key: &str| file[key].as_u64().expect("a number");
            (
                file["path"].as_str().expect("a path").to_owned(),
                number("size"),
                number("held_bytes"),
            )
        };
        let rows: Vec<_> = listed.as_array().expect("a list").iter().map(row).collect();
        let expected = [("d/half", 5005, 5), ("new", 3, 3), ("old", 13, 3)];
        assert_eq!(
            rows,
            expected.map(|(path, size, held)| (path.to_owned(), size, held)),
            "{frontend}"
        );
        let text = run(&[]).stdout;
        let columns: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            columns[1][2..],
            ["3", "B", "3", "B", "new"],
            "{frontend}: {text}"
        );
        mount.umount();
    }
}

// ---- faults --------------------------------------------------------------------------------------

/// kill -9 of firnd; the tree stays.
fn kill_firnd(mount: FirnMount<'_>) {
    kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    mount.abandon();
}

/// Proves S-stub-4: a writer under the library is killed, or firnd, or both, or firnd alone and mounted again
/// while the writer goes on; what was acknowledged is there.
#[test]
fn kill_9_of_writer_or_firnd_at_any_moment_loses_nothing_acknowledged() {
    let seed = seed("stub-kill");
    let mut rng = generator(seed);
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 6) {
        let sandbox = Sandbox::new("stub-kill");
        let mount = tree(&sandbox, SMALL);
        let log = sandbox.join("log");
        let mut writer = Command::new(helper_binary());
        writer
            .arg("writer")
            .arg(mount.path())
            .arg(&log)
            .arg((seed % 1_000_000 + round).to_string());
        let mut writer = preload(&sandbox, &mut writer)
            .stderr(Stdio::null())
            .spawn()
            .expect("start the writer");
        let length = || fs::metadata(&log).map_or(0, |meta| meta.len());
        wait_until("something is written", Duration::from_secs(20), || {
            length() > 4000
        });
        // Any moment will do: this is no wait for a condition.
        std::thread::sleep(Duration::from_millis(rng.random_range(0..300)));
        let alive = match round % 3 {
            0 => mount,
            1 => {
                kill_firnd(mount);
                let again = tree(&sandbox, SMALL);
                let before = length();
                wait_until("the writer goes on", Duration::from_secs(20), || {
                    length() > before + 2000
                });
                again
            }
            _ => {
                kill_firnd(mount);
                end(&mut writer);
                tree(&sandbox, SMALL)
            }
        };
        end(&mut writer);
        let backing = alive.umount();
        let verified = verify(&backing, &log);
        assert!(verified.ops > 0, "round {round}: nothing was acknowledged");
    }
}

fn end(writer: &mut Child) {
    let _ = writer.kill();
    writer.wait().expect("wait for the writer");
}

/// Whole and torn records of a file of numbers of 8 bytes, each of which a record of `NUMBERS` repeats.
fn count_numbers(bytes: &[u8]) -> Vec<(u64, usize)> {
    let mut runs: Vec<(u64, usize)> = Vec::new();
    for word in bytes.chunks(8) {
        let text = std::str::from_utf8(word).expect("digits");
        let number = text.trim().parse().expect("a number");
        match runs.last_mut() {
            Some((last, count)) if *last == number => *count += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}

/// Proves S-stub-13, S-stub-16: firnd is killed while one or two processes append records of 1 MiB, and mounted again at
/// once. What was acknowledged is there once and in one piece; what failed, because of the other process, at most once.
#[test]
fn regression_an_append_whose_firnd_is_killed_is_never_there_twice() {
    const NUMBERS: usize = 1 << 17;
    let seed = seed("stub-append");
    let mut rng = generator(seed);
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 6) {
        let sandbox = Sandbox::new("stub-append");
        let mut mount = tree(&sandbox, &patient(""));
        let stop = sandbox.join("stop");
        let script = "import errno, os, sys; os.chdir(sys.argv[1]); stop, first = sys.argv[2], int(sys.argv[3])
f = os.open('log', os.O_CREAT | os.O_APPEND | os.O_WRONLY)
for number in range(first, first + 1000000, 2):
    if os.path.exists(stop): break
    record = (b'%07d ' % number) * (1 << 17)
    try:
        while record: record = record[os.write(f, record):]
        print(number, 'written', flush=True)
    except OSError as e:
        assert e.errno == errno.EIO, e
        print(number, 'failed', flush=True)";
        let start = |first: &str| {
            let mut command = python(script, mount.path());
            preload(&sandbox, command.arg(&stop).arg(first))
                .stdout(fs::File::create(sandbox.join(first)).expect("create"))
                .stderr(Stdio::inherit())
                .spawn()
                .expect("start python")
        };
        let is_alone = round % 2 == 0;
        let names = if is_alone { vec!["0"] } else { vec!["0", "1"] };
        let mut programs: Vec<Child> = names.into_iter().map(start).collect();
        let said = |name: &str| fs::read_to_string(sandbox.join(name)).unwrap_or_default();
        for _ in 0..3 {
            let before = said("0").lines().count();
            wait_until("records are written", Duration::from_secs(60), || {
                said("0").lines().count() > before + 2
            });
            // Any moment will do: this is no wait for a condition.
            std::thread::sleep(Duration::from_millis(rng.random_range(0..40)));
            kill_firnd(mount);
            mount = tree(&sandbox, &patient(""));
        }
        fs::write(&stop, b"").expect("stop");
        for program in &mut programs {
            let ended = wait_child(program, Duration::from_secs(60)).expect("python ends");
            assert!(ended.success(), "round {round}: {ended}");
        }
        let backing = mount.umount();
        let runs = count_numbers(&read(&backing.join("log")));
        let lines = said("0") + &said("1");
        assert!(
            !is_alone || !lines.contains("failed"),
            "seed {seed}, round {round}: {lines}"
        );
        for line in lines.lines() {
            let (number, end) = line.split_once(' ').expect("a number and how it ended");
            let number: u64 = number.parse().expect("a number");
            let found: Vec<usize> = runs
                .iter()
                .filter(|run| run.0 == number)
                .map(|run| run.1)
                .collect();
            let is_right = match end {
                "written" => found == [NUMBERS],
                _ => found.len() <= 1 && found.iter().all(|count| *count <= NUMBERS),
            };
            assert!(is_right, "seed {seed}, round {round}: {line}, {found:?}");
        }
    }
}

/// Proves S-stub-15: the library needs descriptors of its own, and says so where there are none.
#[test]
fn regression_a_process_without_descriptors_gets_emfile() {
    let sandbox = Sandbox::new("stub-descriptors");
    let mount = tree(&sandbox, &patient(""));
    let script = "import errno, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); path = sys.argv[1] + '/x'; taken = []
try:
    while True: taken.append(os.open('/dev/null', os.O_RDONLY))
except OSError as e: assert e.errno == errno.EMFILE, e
def fails(call):
    try: call(); sys.exit('done')
    except OSError as e: assert e.errno == errno.EMFILE, e
make = lambda: os.open(path, os.O_CREAT | os.O_RDWR)
for free in 0, 1, 2:
    fails(make)
    os.close(taken.pop())
f = make(); assert os.write(f, b'data') == 4 and os.pread(f, 9, 0) == b'data'
a = os.open(path, os.O_APPEND | os.O_WRONLY); fails(lambda: os.open(path, os.O_RDONLY))
# Without a file in memory a large append is a short one.
done = os.write(a, b'z' * 200000); assert done > 0 and os.fstat(a).st_size == done + 4";
    run(preload(&sandbox, &mut python(script, mount.path())).env("FIRN_PRELOAD_WAIT", "100000"))
        .ok();
    mount.umount();
}

/// Proves S-stub-5.
#[test]
fn calls_fail_with_eio_while_firnd_is_gone_and_never_write_into_the_stub() {
    let sandbox = Sandbox::new("stub-gone");
    let mount = tree(&sandbox, &patient("drain=demand"));
    let path = mount.path().to_owned();
    let go = sandbox.join("go");
    let script = "import errno, os, sys, time
os.chdir(sys.argv[1]); f = os.open('x', os.O_CREAT | os.O_RDWR); os.write(f, b'before' * 1000)
open(sys.argv[2] + '.ready', 'w').close()
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
# What is leased goes on into memory; what is not fails.
try:
    for i in range(100000): os.write(f, b'after ' * 1000)
    sys.exit('written')
except OSError as e: assert e.errno == errno.EIO, e
for call in [lambda: os.read(f, 1), lambda: os.fstat(f), lambda: open('y', 'w'), lambda: os.truncate('x', 5)]:
    try: call(); sys.exit('answered')
    except OSError as e: assert e.errno == errno.EIO, e";
    let mut program = python(script, &path);
    let program = preload(&sandbox, &mut program)
        .env("FIRN_PRELOAD_WAIT", "1")
        .arg(&go);
    let mut program = program
        .stderr(Stdio::inherit())
        .spawn()
        .expect("start python");
    wait_until("it is ready", Duration::from_secs(20), || {
        sandbox.join("go.ready").exists()
    });
    kill_firnd(mount);
    fs::write(&go, b"").expect("go");
    let ended = wait_child(&mut program, Duration::from_secs(60)).expect("python ends");
    assert!(ended.success(), "{ended}");
    assert_eq!(stubs_with_bytes(&path), [] as [PathBuf; 0]);
    let mount = tree(&sandbox, &patient("drain=demand"));
    run(preload(
        &sandbox,
        &mut shell("head -c 6000 x | md5sum; test ! -s y", mount.path()),
    ))
    .ok();
    let backing = mount.umount();
    assert_eq!(&read(&backing.join("x"))[..6000], b"before".repeat(1000));
}

/// Proves S-stub-4: `firn recover` carries names over, and a mount in another way is refused meanwhile.
#[test]
fn a_tree_whose_firnd_was_killed_is_recovered_or_mounted_again_and_nothing_else() {
    let sandbox = Sandbox::new("stub-recover");
    let mount = tree(&sandbox, &patient("drain=demand"));
    let path = mount.path().to_owned();
    let backing = mount.backing().to_owned();
    run(preload(
        &sandbox,
        &mut shell(
            "mkdir d; echo one > d/x; mv d e; echo two > y",
            mount.path(),
        ),
    ))
    .ok();
    kill_firnd(mount);
    run(&mut sandbox.firn(mount_args(&backing, &path, "")))
        .code(11)
        .says("firn recover");
    run(&mut sandbox.firn(["umount".into(), path.clone().into_os_string()])).says("mount it again");
    run(&mut sandbox.firn(["recover".into(), backing.clone().into_os_string()])).ok();
    assert_eq!(
        (read(&backing.join("e/x")), read(&backing.join("y"))),
        (b"one\n".to_vec(), b"two\n".to_vec())
    );
    assert!(!is_mounted(&path), "the tree is still there");
    FirnMount::new(&sandbox, "").umount();
}

/// Proves S-stub-6.
#[test]
fn a_program_without_the_library_sees_empty_files_and_what_it_writes_is_taken_in() {
    let sandbox = Sandbox::new("stub-static");
    fs::write(sandbox.join("backing/old"), b"0123456789").expect("write");
    let mount = tree(&sandbox, &patient("drain=demand"));
    assert_eq!(read(&mount.join("old")), b"");
    fs::write(mount.join("new"), b"by a static program").expect("write");
    let cat = run(preload(
        &sandbox,
        &mut shell("cat new old; wc -c < new; echo x >> new", mount.path()),
    ))
    .ok();
    assert_eq!(cat.stdout, "by a static program012345678919\n");
    let backing = mount.umount();
    assert_eq!(read(&backing.join("new")), b"by a static programx\n");
    assert_eq!(read(&backing.join("old")), b"0123456789");
}

// ---- firn run, other users, bad input ------------------------------------------------------------

/// A command in a mount namespace in which there is no /dev/fuse.
fn without_fuse(sandbox: &Sandbox, script: &str) -> Command {
    let mut command = Command::new("unshare");
    sandbox.environment(&mut command);
    command
        .env("FIRN", firn_binary())
        .current_dir(sandbox.path());
    let script = format!("mount --bind /dev/null /dev/fuse && {script}");
    command.args(["-m", "bash", "-euc", &script]);
    command
}

#[test]
fn firn_run_serves_the_files_without_fuse_and_says_so() {
    let sandbox = Sandbox::new("stub-run");
    let script = r#""$FIRN" run --memory 16M --backing out --prefix ckpt -- bash -euc '
        mkdir $FIRN_PREFIX/step; echo data > $FIRN_PREFIX/step/rank0; cat $FIRN_PREFIX/step/rank0; stat -c %s $FIRN_PREFIX/step/rank0'"#;
    let outcome = run(&mut without_fuse(&sandbox, script))
        .ok()
        .says("frontend=preload");
    assert_eq!(outcome.stdout, "data\n5\n");
    assert_eq!(read(&sandbox.join("out/step/rank0")), b"data\n");
    assert!(!sandbox.join("out/.firn").exists());
    // A job that fails leaves its files for the next, in memory; one that succeeds without a backing, nothing.
    let script = r#""$FIRN" run --memory 16M --prefix ckpt -- bash -c 'echo held > $FIRN_PREFIX/x; exit 3' && exit 99
        "$FIRN" run --memory 16M --prefix ckpt -- bash -euc 'cat $FIRN_PREFIX/x'; ls ckpt "$FIRN_RUNTIME_DIR""#;
    let outcome = run(without_fuse(&sandbox, script).stdin(Stdio::null())).says("stay in memory");
    assert!(outcome.stdout.starts_with("held\n"), "{outcome}");
    let left: Vec<&str> = outcome
        .stdout
        .lines()
        .filter(|line| line.ends_with(".stub") || *line == "x")
        .collect();
    assert!(left.is_empty(), "{outcome}");
}

/// An ordinary user, and a directory that shares its tmpfs with other files.
#[test]
fn an_ordinary_user_has_a_tree_in_dev_shm() {
    let sandbox = Sandbox::new("stub-user");
    let shm = tempfile::Builder::new()
        .prefix("firn-test-stub-")
        .tempdir_in("/dev/shm")
        .expect("a directory");
    for dir in [sandbox.path(), shm.path(), &sandbox.join("backing")] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o1777)).expect("chmod");
    }
    let bin = sandbox.mkdir("bin");
    for file in [firn_binary(), preload_library()] {
        copy_program(&file, &bin.join(file.file_name().expect("a name")));
    }
    let script = r#"mkdir -m 700 "$SHM/run" "$SHM/tree"; echo beside > "$SHM/beside"
        "$BIN/firn" mount -o arena-size=16M,frontend=preload "$BACKING" "$SHM/tree"
        export LD_PRELOAD="$BIN/libfirn_preload.so"
        mkdir "$SHM/tree/d"; echo data > "$SHM/tree/d/x"; cat "$SHM/tree/d/x" "$SHM/beside"; mv "$SHM/tree/d" "$SHM/tree/e"
        echo more >> "$SHM/beside"; cp "$SHM/beside" "$SHM/tree/copy"; wc -c < "$SHM/tree/copy"
        unset LD_PRELOAD; "$BIN/firn" status "$SHM/tree" > /dev/null; "$BIN/firn" umount "$SHM/tree"
        ls "$SHM/tree"; cat "$BACKING/e/x" "$BACKING/copy"; mkdir "$PLAIN/p"
        "$BIN/firn" mount -o frontend=preload "$BACKING" "$PLAIN/p" && exit 9; echo $?"#;
    let mut command = Command::new("setpriv");
    sandbox.environment(&mut command);
    command.args([
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "bash",
        "-euc",
        script,
    ]);
    command
        .env("BIN", &bin)
        .env("SHM", shm.path())
        .env("BACKING", sandbox.join("backing"));
    command
        .env("PLAIN", sandbox.path())
        .env("FIRN_RUNTIME_DIR", shm.path().join("run"));
    let outcome = run(&mut command)
        .ok()
        .says("choose a directory in /dev/shm");
    assert_eq!(outcome.stdout, "data\nbeside\n12\ndata\nbeside\nmore\n2\n");
}

/// Proves S-stub-9.
#[test]
fn another_user_does_not_get_into_the_tree() {
    let sandbox = Sandbox::new("stub-other");
    for dir in [sandbox.path(), &sandbox.join("backing")] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o1777)).expect("chmod");
    }
    let mount = tree(&sandbox, &patient(""));
    run(preload(
        &sandbox,
        &mut shell("umask 0; echo mine > x", mount.path()),
    ))
    .ok();
    let script = format!("cat {0}/x; echo y > {0}/x; ls {0}", mount.path().display());
    let mut other = Command::new("setpriv");
    other.args([
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "bash",
        "-c",
        &script,
    ]);
    let outcome = run(&mut other);
    assert_eq!(outcome.stdout, "", "{outcome}");
    assert_eq!(
        outcome.stderr.matches("Permission denied").count(),
        3,
        "{outcome}"
    );
    let backing = mount.umount();
    assert_eq!(read(&backing.join("x")), b"mine\n");
}

#[test]
fn random_packets_do_no_harm() {
    let mut rng = generator(seed("stub-pester"));
    let sandbox = Sandbox::new("stub-pester");
    let mount = tree(&sandbox, &patient(""));
    let pid = mount.pid();
    let data = bytes(1, 300_000);
    fs::write(sandbox.join("data"), &data).expect("write");
    run(preload(
        &sandbox,
        &mut shell(
            "cp ../data other; echo > mine; echo > removed",
            mount.path(),
        ),
    ))
    .ok();
    let open = |name: &str| {
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(mount.join(name))
            .expect("open")
    };
    let files = [
        open("mine"),
        open("removed"),
        fs::File::open("/dev/null").expect("open"),
        fs::File::open(mount.path()).expect("open"),
        fs::File::open(sandbox.join("data")).expect("open"),
    ];
    fs::remove_file(mount.join("removed")).expect("unlink");
    pester(&token_of_tree(sandbox.runtime()), &files, 4_000, &mut rng);
    drop(files);
    assert_eq!(mount.pid(), pid);
    run(preload(
        &sandbox,
        &mut shell(
            "cmp ../data other; rm mine; echo new > mine; cat mine",
            mount.path(),
        ),
    ))
    .ok();
    wait_until("the end of the clients", Duration::from_secs(30), || {
        mount.status().direct_clients == 0
    });
    let backing = mount.umount();
    assert_eq!(
        (read(&backing.join("other")), read(&backing.join("mine"))),
        (data, b"new\n".to_vec())
    );
    assert_eq!(fs::read_dir(&backing).expect("the backing").count(), 2);
}

#[test]
fn prefixes_and_options_that_cannot_be_are_refused_with_the_reason() {
    let sandbox = Sandbox::new("stub-bad");
    let backing = sandbox.join("backing");
    let mount_point = sandbox.join("mnt");
    let mount = |options: &str| sandbox.run(mount_args(&backing, &mount_point, options));
    for options in ["frontend=preload,allow-other", "frontend=preload,ro"] {
        mount(options).code(2).says("frontend=preload");
    }
    mount("frontend=window").code(2).says("preload");
    fs::write(mount_point.join("something"), b"").expect("write");
    mount("frontend=preload").code(2).says("empty directory");
    fs::remove_file(mount_point.join("something")).expect("remove");
    let first = tree(&sandbox, "");
    let second = sandbox.mkdir("second");
    sandbox
        .run(mount_args(&backing, &second, "frontend=preload"))
        .code(11)
        .says("already mounted");
    first.umount();
    assert!(!is_mounted(&second));
    unmount_lazily(&second);
}
