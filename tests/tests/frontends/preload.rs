//! Unmodified programs under `LD_PRELOAD=libfirn_preload.so` on a mount: where memory is full, under kill -9, with what
//! only the kernel does. What stub trees do as well is in `frontends.rs`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_tests::ack::verify;
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::{SMALL, patient};
use firn_tests::preloaded::{DIRECT_AFTER, Frontend, call_cases, direct_bytes, source};
use firn_tests::random::{bytes, generator};
use firn_tests::sandbox::preload_library;
use firn_tests::{FirnMount, Sandbox, helper_binary, run, seed, wait_until};
use rand::RngExt;

/// One test for each case of `preload.c` that needs what only the kernel does.
macro_rules! call_cases {
    ($($test:ident: $case:literal,)*) => {$(
        #[test]
        fn $test() {
            let held = "close=held,drain=demand";
            for (options, direct_after) in [("", "0"), (held, "0"), (held, "20000")] {
                Frontend::Mount.same_as_plain($case, &patient(options), |dir| {
                    let mut command = Command::new(cases());
                    command.arg(dir).arg($case).env(DIRECT_AFTER, direct_after);
                    command
                });
            }
        }
    )*};
}

call_cases! {
    regression_an_opener_does_not_undo_a_store_to_a_mapping: "mapped-again",
    exec_hands_descriptors_on_with_their_offsets: "execs",
    reading_mapping_and_truncating_what_is_being_written: "both-ways",
    sendfile_splice_and_copy_use_and_move_the_offset: "transfers",
}

/// The program of the cases.
fn cases() -> &'static Path {
    call_cases(Path::new(env!("CARGO_TARGET_TMPDIR")))
}

/// Puts the library before a program and lets it report.
fn preload(command: &mut Command) -> &mut Command {
    command
        .env("LD_PRELOAD", preload_library())
        .env("FIRN_PRELOAD_REPORT", "1")
}

/// It makes its system calls itself: nothing goes by direct access, and all is right.
#[test]
fn a_static_go_program_is_slow_and_correct() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("static-go");
    let cache = Sandbox::new("gocache");
    let mut build = Command::new("go");
    build
        .args(["build", "-o"])
        .arg(&program)
        .arg(source("static.go"));
    build
        .env("CGO_ENABLED", "0")
        .env("GO111MODULE", "off")
        .env("GOTOOLCHAIN", "local")
        .env("GOFLAGS", "");
    build
        .env("GOCACHE", cache.join("cache"))
        .env("GOPATH", cache.join("path"));
    run(&mut build).ok();
    Frontend::Mount.same_as_plain("go", &patient(""), |dir| {
        let mut command = Command::new(&program);
        command.arg(dir);
        command
    });
}

#[test]
fn a_full_arena_slows_writers_and_loses_nothing() {
    let sandbox = Sandbox::new("preload-full");
    let mount = FirnMount::new(&sandbox, "arena-size=4M,chunk-size=256K");
    let data = bytes(5, 40_000_000);
    fs::write(sandbox.join("data"), &data).expect("write");
    let script = "import sys; data = open(sys.argv[1], 'rb').read()
for block in 640, 4000, 1000000:
    with open(sys.argv[2] + '/by%d' % block, 'wb', buffering=0) as f:
        for at in range(0, len(data), block): assert f.write(data[at:at + block]) == len(data[at:at + block])";
    let mut python = Command::new("/usr/bin/python3");
    python
        .args(["-c", script])
        .arg(sandbox.join("data"))
        .arg(mount.path());
    let wrote = run(preload(&mut python)).ok();
    assert!(direct_bytes(&wrote, "write") > 1_000_000, "{wrote}");
    let backing = mount.umount();
    for block in [640, 4000, 1_000_000] {
        assert_same_bytes(
            "what was written",
            &read(&backing.join(format!("by{block}"))),
            &data,
        );
    }
}

/// A checkpoint larger than memory, without a spill file and with one that is too small as well.
#[test]
fn where_memory_and_spill_file_are_full_writers_get_enospc_and_go_on_when_there_is_room() {
    for (spill, fits) in [(false, 12), (true, 36)] {
        let sandbox = Sandbox::new("preload-enospc");
        let mut options = "memory=16M,chunk-size=1M,drain=demand".to_owned();
        if spill {
            options += &format!(",spill={},spill-size=32M", sandbox.mkdir("local").display());
        }
        let mount = FirnMount::new(&sandbox, &options);
        let script = "import errno, os, sys; os.chdir(sys.argv[1]); fits = int(sys.argv[2])
block = lambda at: bytes([at % 251]) * (1 << 20)
def fill(name, most):
    f = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY); size = 0
    try:
        while size < most << 20: size += os.write(f, block(size >> 20)[size % (1 << 20):])
        os.close(f); return size
    except OSError as e: assert e.errno == errno.ENOSPC, e
    assert os.fstat(f).st_size == os.lseek(f, 0, os.SEEK_CUR) == size, size
    os.close(f); return size
def check(name, size):
    with open(name, 'rb', buffering=0) as f:
        for at in range(0, size, 1 << 20): assert f.read(1 << 20) == block(at >> 20)[:size - at], (name, at)
        assert f.read(1) == b''
assert fill('first', fits) == fits << 20
cut = fill('second', 64); assert cut < 16 << 20, cut
check('first', fits << 20); check('second', cut)
os.unlink('first'); assert fill('third', fits - 2) == fits - 2 << 20
check('second', cut); check('third', fits - 2 << 20)
os.unlink('second')";
        let mut python = Command::new("/usr/bin/python3");
        python
            .args(["-c", script])
            .arg(mount.path())
            .arg(fits.to_string());
        let outcome = run(preload(&mut python)).ok();
        assert!(direct_bytes(&outcome, "write") > 20_000_000, "{outcome}");
        assert_eq!(
            mount
                .status()
                .spill
                .is_some_and(|spill| spill.used_bytes > 0),
            spill
        );
        let backing = mount.umount();
        assert_eq!(
            fs::metadata(backing.join("third")).expect("third").len(),
            (fits - 2) << 20
        );
    }
}

/// The next job may ask for another size; what is held decides.
#[test]
fn what_is_held_is_read_by_a_mount_that_asks_for_another_geometry() {
    let sandbox = Sandbox::new("preload-geometry");
    // A file that moves into a memory file meanwhile ends a list, and one call is the kernel's.
    let held = "memory=32M,chunk-size=1M,drain=demand,memory-files=0";
    let mount = FirnMount::new(&sandbox, held);
    let python = |script: &str, dir: &Path| {
        let mut python = Command::new("/usr/bin/python3");
        run(preload(python.args(["-c", script]).arg(dir))).ok()
    };
    let write = "import sys; f = open(sys.argv[1] + '/step', 'wb', buffering=0)
for i in range(24): f.write(bytes([i]) * (1 << 20))";
    let check = "import sys; f = open(sys.argv[1] + '/step', 'rb', buffering=0)
for i in range(24): assert f.read(1 << 20) == bytes([i]) * (1 << 20), i
assert f.read(1) == b''";
    python(write, mount.path());
    mount.kill();
    for other in [
        "memory=64M,chunk-size=4M,drain=demand,memory-files=0",
        "memory=8M,chunk-size=256K,drain=demand,memory-files=0",
        held,
    ] {
        let mount = FirnMount::new(&sandbox, other);
        let got = python(check, mount.path());
        assert_eq!(direct_bytes(&got, "read"), 24 << 20, "{got}");
        assert_eq!(mount.status().arena_bytes, 32 << 20);
        mount.kill();
    }
    let mount = FirnMount::new(&sandbox, "memory=64M,chunk-size=4M,drain=demand");
    let backing = mount.umount();
    python(check, &backing);
    let mount = FirnMount::new(&sandbox, "memory=64M,chunk-size=4M,drain=demand");
    assert_eq!(mount.status().arena_bytes, 64 << 20, "it was empty");
    mount.umount();
}

/// A writer under the library is killed, or firnd, or both; what was acknowledged is there.
#[test]
fn kill_9_of_writer_or_firnd_at_any_moment_loses_nothing_acknowledged() {
    let seed = seed("preload-kill");
    let mut rng = generator(seed);
    for round in 0..6u64 {
        let sandbox = Sandbox::new("preload-kill");
        let mount = FirnMount::new(&sandbox, SMALL);
        let log = sandbox.join("log");
        let mut writer = Command::new(helper_binary());
        writer
            .arg("writer")
            .arg(mount.path())
            .arg(&log)
            .arg((seed + round).to_string());
        let mut writer = preload(&mut writer)
            .stderr(Stdio::null())
            .spawn()
            .expect("start the writer");
        wait_until("something is written", Duration::from_secs(20), || {
            fs::metadata(&log).is_ok_and(|meta| meta.len() > 4000)
        });
        // Any moment will do: this is no wait for a condition.
        std::thread::sleep(Duration::from_millis(rng.random_range(0..400)));
        let mut mount = Some(mount);
        if round % 3 == 1 {
            mount.take().map(FirnMount::kill);
        }
        writer.kill().ok();
        writer.wait().expect("wait for the writer");
        let alive = match mount {
            Some(mount) if round % 3 == 0 => mount,
            dying => {
                dying.map(FirnMount::kill);
                FirnMount::new(&sandbox, SMALL)
            }
        };
        let backing = alive.umount();
        let verified = verify(&backing, &log);
        assert!(verified.ops > 0, "round {round}: nothing was acknowledged");
    }
}

#[test]
fn programs_run_as_ever_where_no_firnd_is() {
    let sandbox = Sandbox::new("preload-alone");
    let early = sandbox.join("early");
    let mut command = Command::new(cases());
    command
        .arg(sandbox.path())
        .arg("sizes")
        .env("PRELOAD_EARLY", &early);
    let outcome = run(preload(&mut command)).ok();
    assert_eq!(outcome.stderr, "", "nothing on a mount, so no report");
    assert_eq!(
        fs::read_to_string(&early).expect("what constructor and destructor wrote"),
        "early\nlate\n"
    );
    for program in ["true", "ls", "date", "id"] {
        run(preload(&mut Command::new(program))).ok();
    }
}

/// Constructors of libraries that were loaded later run earlier: those of malloc replacements, say.
#[test]
fn calls_before_the_library_has_started_work() {
    let sandbox = Sandbox::new("preload-early");
    let other = sandbox.join("other.so");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-O1", "-w", "-shared", "-fPIC", "-o"])
        .arg(&other)
        .arg(source("preload.c"));
    run(&mut compiler).ok();
    let mount = FirnMount::new(&sandbox, SMALL);
    let mut program = Command::new("true");
    program.env(
        "LD_PRELOAD",
        format!("{}:{}", preload_library().display(), other.display()),
    );
    run(program.env("PRELOAD_EARLY", mount.join("early"))).ok();
    assert_eq!(read(&mount.join("early")), b"early\nlate\n");
    mount.umount();
}

/// Proves S-direct-11: a job's environment reaches programs of containers, too.
#[test]
fn regression_a_program_of_musl_runs_as_without_the_library() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("musl");
    let mut compiler = Command::new("musl-gcc");
    compiler.args(["-O2", "-w", "-pthread", "-o"]).arg(&program);
    run(compiler.arg(source("musl.c"))).ok();
    Frontend::Mount.same_as_plain("musl", &patient(""), |dir| {
        let mut command = Command::new(&program);
        command.arg(dir);
        command
    });
}

/// Proves S-direct-12: the first calls of a process, which connect, and the later ones, over both frontends.
#[test]
fn regression_a_call_needs_no_more_than_4_kib_of_its_callers_stack() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stacks");
    let mut compiler = Command::new("cc");
    // The loader finds functions at the start: a first call would take its stack, with or without the library.
    compiler
        .args(["-O2", "-w", "-Wl,-z,now", "-o"])
        .arg(&program);
    run(compiler.arg(source("stacks.c"))).ok();
    for frontend in [Frontend::Mount, Frontend::Tree] {
        let sandbox = Sandbox::new("stacks");
        let mount = frontend.mount(&sandbox, &patient("close=held,drain=demand"));
        let mut command = Command::new(&program);
        let measured = run(frontend.preload(&sandbox, command.arg(mount.path()))).ok();
        let calls: Vec<(&str, u64)> = measured
            .stdout
            .lines()
            .filter_map(|line| line.split_once(": "))
            .map(|(call, bytes)| (call, bytes.parse().expect("a number")))
            .collect();
        assert!(calls.len() > 30, "{measured}");
        let large: Vec<_> = calls.iter().filter(|(_, bytes)| *bytes > 4096).collect();
        assert!(large.is_empty(), "{frontend:?}: {large:?}");
        mount.umount();
    }
}

/// The library is loaded into every program: neither JSON nor the control protocol is linked into it.
#[test]
fn the_library_is_without_the_control_protocol() {
    let symbols = run(Command::new("nm").arg("-C").arg(preload_library())).ok();
    assert!(symbols.stdout.contains("firn_direct"), "nm has names");
    for unwanted in ["serde_json", "firn_protocol", "firn_client"] {
        assert!(
            !symbols.stdout.contains(unwanted),
            "{unwanted} is linked in"
        );
    }
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/firn-preload/Cargo.toml");
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--offline", "--edges", "normal", "--prefix", "none"]);
    let tree = run(tree.arg("--manifest-path").arg(manifest)).ok();
    assert!(tree.stdout.contains("firn-direct"), "{tree}");
    for unwanted in ["serde_json", "firn-protocol", "firn-client"] {
        assert!(!tree.stdout.contains(unwanted), "{unwanted}: {tree}");
    }
}
