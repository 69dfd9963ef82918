//! Unmodified programs under `LD_PRELOAD=libfirn_preload.so`: on a plain directory and on a mount they do
//! what they do without it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use firn_tests::ack::verify;
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::{bytes, generator};
use firn_tests::sandbox::preload_library;
use firn_tests::scripts::{PYTHON, SHELL, SQLITE, TAR};
use firn_tests::suite::{has_memory_gib, has_torch, python_packages};
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, Outcome, Sandbox, helper_binary, run, seed, wait_until};
use rand::RngExt;

/// Source of a program of these tests.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
}

/// Compiles a program once.
fn compiled(compiler: &str, name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name.replace('.', "-"));
    let mut command = Command::new(compiler);
    command
        .args(["-O2", "-D_FORTIFY_SOURCE=2", "-w", "-pthread", "-o"])
        .arg(&program)
        .arg(source(name));
    run(&mut command).ok();
    program
}

/// The program of the cases.
fn cases() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled("cc", "preload.c"))
}

/// Puts the library before a program and lets it report.
fn preload(command: &mut Command) -> &mut Command {
    command
        .env("LD_PRELOAD", preload_library())
        .env("FIRN_PRELOAD_REPORT", "1")
}

fn shell(script: &str, dir: &Path) -> Command {
    let mut command = Command::new("bash");
    command
        .args(["-euc", script, "bash"])
        .arg(dir)
        .current_dir(dir);
    command
}

/// Bytes that calls of one kind put past the kernel, from the reports of all processes.
fn past_the_kernel(outcome: &Outcome, call: &str) -> u64 {
    let head = format!(": {call}: ");
    let lines = outcome
        .stderr
        .lines()
        .filter_map(|line| line.split_once(&head));
    let bytes = lines.filter_map(|(_, rest)| {
        rest.split_once('(')?
            .1
            .split(' ')
            .next()?
            .parse::<u64>()
            .ok()
    });
    bytes.sum()
}

/// Runs a program in a plain directory without the library, in another with it, and on a mount with it:
/// exit code, output and files must be the same. Gives what it said on the mount.
#[track_caller]
fn same_everywhere(name: &str, options: &str, program: impl Fn(&Path) -> Command) -> Outcome {
    let sandbox = Sandbox::new(name);
    let plain = sandbox.mkdir("plain");
    let expected = run(&mut program(&plain));
    let other = sandbox.mkdir("other");
    let without_mount = run(preload(&mut program(&other)));
    compare(&without_mount, &expected);
    assert_same(
        "files of a plain directory",
        &snapshot(&other),
        &snapshot(&plain),
    );

    let mount = FirnMount::new(&sandbox, options);
    let found = run(preload(&mut program(mount.path())));
    compare(&found, &expected);
    assert_same(
        "files on the mount",
        &snapshot(mount.path()),
        &snapshot(&plain),
    );
    let backing = mount.umount();
    assert_same(
        "files in the backing",
        &snapshot(&backing),
        &snapshot(&plain),
    );
    found
}

#[track_caller]
fn compare(found: &Outcome, expected: &Outcome) {
    assert_eq!(found.code, expected.code, "{found}\ninstead of\n{expected}");
    assert_eq!(found.stdout, expected.stdout, "{found}");
    assert!(!expected.stdout.contains("failed"), "{expected}");
}

/// One test for each case of `preload.c`.
macro_rules! same {
    ($($test:ident: $case:literal,)*) => {$(
        #[test]
        fn $test() {
            same_case($case);
        }
    )*};
}

/// What is read back is drained in the first round, and in the arena in the second.
fn same_case(case: &str) {
    for options in [patient(""), patient("close=held,drain=demand")] {
        same_everywhere(case, &options, |dir| {
            let mut command = Command::new(cases());
            command.arg(dir).arg(case);
            command
        });
    }
}

/// Proves S-direct-5.
#[test]
fn regression_buffers_bad_at_either_end_give_what_the_kernel_gives() {
    same_case("bad-buffers");
}

/// Proves S-direct-6.
#[test]
fn regression_a_size_that_was_not_asked_for_is_right_or_not_told() {
    same_case("statx-of-nothing");
}

same! {
    writes_of_all_sizes_are_seen_by_fstat_at_once: "sizes",
    offsets_move_as_in_the_kernel: "seeks",
    vectors_are_written_whole_and_bad_ones_refused: "vectors",
    a_forked_child_shares_the_offset: "forks",
    appends_of_two_processes_do_not_overwrite: "appends",
    regression_an_opener_does_not_undo_a_store_to_a_mapping: "mapped-again",
    files_made_again_show_no_bytes_of_others: "reuse",
    a_descriptor_without_a_path_is_asked_and_linked: "empty-paths",
    locks_hold_and_move_no_offset: "locks",
    programs_built_for_an_old_c_library_see_lengths: "old-stats",
    exec_hands_descriptors_on_with_their_offsets: "execs",
    a_program_replaced_in_the_middle_of_a_file_goes_on_where_it_was: "exec",
    a_child_of_vfork_changes_nothing_of_its_parents: "vforks",
    spawned_programs_share_offsets: "spawns",
    copied_descriptors_share_one_offset_also_on_internal_numbers: "dups",
    closing_everything_leaves_the_program_working: "closes",
    a_number_closed_by_a_raw_call_is_another_descriptor: "raw-closes",
    a_descriptor_sent_over_a_socket_shares_the_offset: "rights",
    relative_temporary_renamed_and_nameless_files_are_written: "relative",
    a_signal_handler_writes_to_the_descriptor_it_interrupts: "handlers",
    threads_that_share_a_descriptor_lose_nothing: "threads",
    bad_pointers_give_efault: "bad-pointers",
    reading_mapping_and_truncating_what_is_being_written: "both-ways",
    stdio_mixes_with_descriptors: "stdio",
    sendfile_splice_and_copy_use_and_move_the_offset: "transfers",
    asynchronous_writes_and_plain_ones_agree: "asynchronous",
    fortified_calls_read_and_check: "fortified",
    a_limit_of_the_file_size_holds: "limits",
    readers_see_what_was_written_and_every_change: "readers",
    a_reader_sees_every_change_of_a_file_that_was_at_rest: "lists",
    offsets_beyond_four_gigabytes_are_kept: "huge-offsets",
}

/// The kernel takes 2 GiB less a page in one call.
#[test]
fn calls_of_more_than_two_gigabytes_are_cut_as_by_the_kernel() {
    if !has_memory_gib(6, 3) {
        return;
    }
    let sandbox = Sandbox::new("preload-longs");
    let mount = FirnMount::new(
        &sandbox,
        "memory=2304M,chunk-size=4M,drain=demand,populate=no",
    );
    let mut command = Command::new(cases());
    let outcome = run(preload(command.arg(mount.path()).arg("longs"))).ok();
    let numbers: Vec<&str> = outcome
        .stdout
        .lines()
        .filter_map(|line| line.rsplit_once(": ").map(|(_, number)| number))
        .collect();
    let most = "2147479552";
    assert_eq!(
        numbers,
        [most, most, "0", "0", most, "1", most, most, "120", "0", "0"],
        "{outcome}"
    );
    assert!(
        past_the_kernel(&outcome, "write") > 2_000_000_000,
        "{outcome}"
    );
    fs::remove_file(mount.join("longs")).expect("unlink");
    mount.umount();
}

/// Their own start calls hooks before the library has started, and every hook may find them in its way.
#[test]
fn replacements_of_malloc_stand_before_and_behind_the_library() {
    for malloc in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"] {
        let library = preload_library();
        let library = library.display();
        for (at, both) in [format!("{malloc}:{library}"), format!("{library}:{malloc}")]
            .iter()
            .enumerate()
        {
            let sandbox = Sandbox::new("preload-malloc");
            let plain = sandbox.mkdir("plain");
            let mount = FirnMount::new(&sandbox, &patient("close=held,drain=demand"));
            for case in [
                "sizes", "forks", "vforks", "spawns", "threads", "handlers", "stdio",
            ] {
                let program = |dir: &Path| {
                    let mut command = Command::new(cases());
                    command.arg(dir).arg(case);
                    command
                };
                let expected = run(&mut program(&plain));
                let found = run(preload(&mut program(mount.path())).env("LD_PRELOAD", both));
                compare(&found, &expected);
                assert!(!found.stderr.contains("cannot be preloaded"), "{found}");
                assert!(
                    found.stderr.contains("firn"),
                    "round {at} did without the library: {found}"
                );
            }
            assert_same(
                "files on the mount",
                &snapshot(mount.path()),
                &snapshot(&plain),
            );
            mount.umount();
        }
    }
}

#[test]
fn fortran_writes_records_of_every_kind() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("records-f90");
    run(Command::new("gfortran")
        .args(["-O1", "-o"])
        .arg(&program)
        .arg(source("records.f90")))
    .ok();
    let outcome = same_everywhere("fortran", &patient("close=held,drain=demand"), |dir| {
        let mut command = Command::new(&program);
        command.arg(dir);
        command
    });
    assert!(past_the_kernel(&outcome, "write") > 1_000_000, "{outcome}");
}

/// Nothing goes past the kernel, and all is right.
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
    same_everywhere("go", &patient(""), |dir| {
        let mut command = Command::new(&program);
        command.arg(dir);
        command
    });
}

/// Needs PyTorch, which not every release of Debian and Ubuntu has.
#[test]
fn tensors_of_pytorch_and_safetensors_are_whole() {
    if !has_torch() {
        return;
    }
    let sandbox = Sandbox::new("preload-torch");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M,close=held");
    let python = |verb: &str, dir: &Path| {
        let mut command = Command::new("/usr/bin/python3");
        command
            .arg(source("tensors.py"))
            .arg(verb)
            .arg(dir)
            .env("PYTHONPATH", python_packages());
        run(preload(&mut command)).ok()
    };
    let outcome = python("write", mount.path());
    let past = past_the_kernel(&outcome, "write") + past_the_kernel(&outcome, "writev");
    assert!(past > 1_000_000, "{outcome}");
    python("check", mount.path());
    let backing = mount.umount();
    python("check", &backing);
}

#[test]
fn a_database_keeps_its_locks_and_its_rows() {
    same_everywhere("sqlite", &patient(""), |dir| {
        let mut command = shell(SQLITE, dir);
        command.env("MODES", "DELETE WAL TRUNCATE");
        command
    });
}

#[test]
fn streams_of_cpp_are_written_and_read() {
    let program = compiled("c++", "streams.cpp");
    let outcome = same_everywhere("streams", &patient(""), |dir| {
        let mut command = Command::new(&program);
        command.arg(dir);
        command
    });
    let past = past_the_kernel(&outcome, "write") + past_the_kernel(&outcome, "writev");
    assert!(past > 3_000_000, "{outcome}");
}

#[test]
fn shells_redirect_and_keep_descriptors() {
    same_everywhere("bash", &patient(""), |dir| shell(SHELL, dir));
}

#[test]
fn python_writes_and_starts_programs() {
    same_everywhere("python", &patient(""), |dir| {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", PYTHON]).arg(dir);
        command
    });
}

#[test]
fn tar_packs_and_unpacks() {
    let outcome = same_everywhere("tar", &patient(""), |dir| shell(TAR, dir));
    assert!(past_the_kernel(&outcome, "write") > 1_000_000, "{outcome}");
}

#[test]
fn arrays_of_numpy_and_h5py_are_whole() {
    let sandbox = Sandbox::new("preload-h5py");
    let mount = FirnMount::new(&sandbox, SMALL);
    let python = |verb: &str, file: PathBuf| {
        let mut command = Command::new("/usr/bin/python3");
        run(preload(
            command.arg(source("datasets.py")).arg(verb).arg(file),
        ))
        .ok()
    };
    python("write", mount.join("model.h5"));
    python("check", mount.join("model.h5"));
    let script = "import numpy as np, sys; d=sys.argv[1]; a=np.arange(3000000.0).reshape(6000,500)
np.save(d+'/a.npy', a); a.tofile(d+'/raw'); np.savez(d+'/b.npz', a=a, b=a.T)
assert (np.load(d+'/a.npy')==a).all() and (np.fromfile(d+'/raw')==a.ravel()).all()
m=np.load(d+'/a.npy', mmap_mode='r+'); assert (m==a).all(); m[7]=1; m.flush(); a[7]=1
assert (np.load(d+'/a.npy')==a).all(); assert (np.load(d+'/b.npz')['b'][0]==np.arange(6000)*500.0).all()";
    run(preload(
        Command::new("/usr/bin/python3")
            .args(["-c", script])
            .arg(mount.path()),
    ))
    .ok();
    let backing = mount.umount();
    python("check", backing.join("model.h5"));
    assert_eq!(
        read(&backing.join("a.npy")).len(),
        read(&backing.join("raw")).len() + 128
    );
}

#[test]
fn an_mpi_program_writes_one_file_a_rank_and_one_for_all() {
    let sandbox = Sandbox::new("preload-mpi");
    let mount = FirnMount::new(&sandbox, SMALL);
    for name in ["ranks.c", "shared.c"] {
        let program = sandbox.join(name.replace(".c", ""));
        run(Command::new("mpicc")
            .args(["-O1", "-o"])
            .arg(&program)
            .arg(source(name)))
        .ok();
        let mut mpirun = Command::new("mpirun");
        mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "4", "-x"]);
        mpirun.arg(format!("LD_PRELOAD={}", preload_library().display()));
        let answer = run(mpirun.arg(&program).arg(mount.path()).arg("6")).ok();
        assert!(answer.stdout.contains("4 ranks agree"), "{answer}");
    }
    let backing = mount.umount();
    for rank in 0..4 {
        let len = fs::metadata(backing.join(format!("rank.{rank}")))
            .expect("a rank's file")
            .len();
        assert_eq!(len, 6 << 20);
    }
    assert_eq!(
        fs::metadata(backing.join("shared"))
            .expect("the shared file")
            .len(),
        24 << 20
    );
}

#[test]
fn large_and_small_writes_and_reads_go_past_the_kernel() {
    let sandbox = Sandbox::new("preload-past");
    let mount = FirnMount::new(&sandbox, &patient("close=held,drain=demand"));
    let python = |script: &str| {
        let mut python = Command::new("/usr/bin/python3");
        run(preload(python.args(["-c", script]).arg(mount.path()))).ok()
    };
    let wrote = python(
        "import os, sys; os.chdir(sys.argv[1]); f = os.open('large', os.O_CREAT | os.O_WRONLY)
block = bytes(range(256)) * 4096
for i in range(20): os.write(f, block)
os.close(f); f = os.open('small', os.O_CREAT | os.O_WRONLY)
for i in range(100000): os.write(f, b'%064d' % i)",
    );
    assert_eq!(
        past_the_kernel(&wrote, "write"),
        (20 << 20) + 6_400_000,
        "{wrote}"
    );
    let text = String::from_utf8(read(&mount.join("small"))).expect("digits");
    assert!((0..100_000).all(|i| text[i * 64..(i + 1) * 64].parse() == Ok(i)));
    let got = python(
        "import os, sys; os.chdir(sys.argv[1]); f = os.open('large', os.O_RDONLY)
block = bytes(range(256)) * 4096
for i in range(20): assert os.read(f, 1 << 20) == block
assert os.read(f, 1 << 20) == b''
assert os.pread(f, 5000, 3 << 20) == block[:5000]; print(len(open('small', 'rb').read()))",
    );
    assert_eq!(got.stdout, "6400000\n");
    assert!(
        past_the_kernel(&got, "read") >= (20 << 20) + 6_400_000,
        "{got}"
    );
    assert_eq!(past_the_kernel(&got, "pread"), 5000, "{got}");
    let mut off = shell("cat small > copy", mount.path());
    let off = run(preload(&mut off).env("FIRN_PRELOAD", "off")).ok();
    assert_eq!(off.stderr, "");
    mount.umount();
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
    assert!(past_the_kernel(&wrote, "write") > 1_000_000, "{wrote}");
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
        assert!(past_the_kernel(&outcome, "write") > 20_000_000, "{outcome}");
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
    let held = "memory=32M,chunk-size=1M,drain=demand";
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
        "memory=64M,chunk-size=4M,drain=demand",
        "memory=8M,chunk-size=256K,drain=demand",
        held,
    ] {
        let mount = FirnMount::new(&sandbox, other);
        let got = python(check, mount.path());
        assert_eq!(past_the_kernel(&got, "read"), 24 << 20, "{got}");
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
