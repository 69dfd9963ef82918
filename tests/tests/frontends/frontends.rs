//! Unmodified programs under `LD_PRELOAD=libfirn_preload.so`, over each frontend: on a mount and in a stub tree they do
//! what they do in a plain directory without it.
//!
//! A case is written once, as an entry of a table, and is a test in `mount` and a test in `tree`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use firn_tests::fsops::read;
use firn_tests::mount::{SMALL, patient};
use firn_tests::preloaded::{
    DIRECT_AFTER, Frontend, assert_same_outcome, call_cases, compile, direct_bytes, python, shell,
    source,
};
use firn_tests::sandbox::preload_library;
use firn_tests::scripts::{NODE, PYTHON, SHELL, SQLITE, TAR};
use firn_tests::suite::{has_memory_gib, has_torch, python_packages};
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{Sandbox, run, seed};

/// Where programs of these tests are compiled to.
fn program_dir() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Makes a test of each entry over each frontend.
macro_rules! over_each_frontend {
    ($($(#[$doc:meta])* $test:ident: $function:ident($($arg:expr),*);)*) => {
        mod mount {
            use super::*;
            $($(#[$doc])* #[test] fn $test() { $function(Frontend::Mount, $($arg),*); })*
        }

        mod tree {
            use super::*;
            $($(#[$doc])* #[test] fn $test() { $function(Frontend::Tree, $($arg),*); })*
        }
    };
}

over_each_frontend! {
    writes_of_all_sizes_are_seen_by_fstat_at_once: call_case("sizes");
    offsets_move_as_in_the_kernel: call_case("seeks");
    vectors_are_written_whole_and_bad_ones_refused: call_case("vectors");
    /// Proves S-direct-7.
    a_forked_child_shares_the_offset: call_case("forks");
    /// Proves S-direct-7, S-stub-1.
    parent_and_child_that_write_at_once_lose_nothing_and_repeat_nothing: call_case("forks-at-once");
    appends_of_two_processes_do_not_overwrite: call_case("appends");
    /// Proves S-direct-9, S-stub-13.
    regression_an_append_of_any_size_and_kind_is_one_append: call_case("whole-appends");
    files_made_again_show_no_bytes_of_others: call_case("reuse");
    a_descriptor_without_a_path_is_asked_and_linked: call_case("empty-paths");
    locks_hold_and_move_no_offset: call_case("locks");
    /// Proves S-direct-9.
    regression_ranges_of_locks_begin_at_the_offset_or_the_end_that_programs_know: call_case("relative-locks");
    regression_a_lock_ends_with_no_file_that_the_library_opened: call_case("kept-locks");
    /// Proves S-direct-9.
    every_call_that_goes_by_the_offset_or_moves_it_does_as_in_the_kernel: call_case("positions");
    /// Proves S-direct-9, S-stub-14.
    system_calls_by_number_do_what_their_functions_do: call_case("numbers");
    programs_built_for_an_old_c_library_see_lengths: call_case("old-stats");
    /// Proves S-direct-7.
    a_program_replaced_in_the_middle_of_a_file_goes_on_where_it_was: call_case("exec");
    a_child_of_vfork_changes_nothing_of_its_parents: call_case("vforks");
    spawned_programs_share_offsets: call_case("spawns");
    /// Proves S-direct-7.
    copied_descriptors_share_one_offset_also_on_internal_numbers: call_case("dups");
    closing_everything_leaves_the_program_working: call_case("closes");
    a_number_closed_by_a_raw_call_is_another_descriptor: call_case("raw-closes");
    /// Proves S-direct-7.
    a_descriptor_sent_over_a_socket_shares_the_offset: call_case("rights");
    relative_temporary_renamed_and_nameless_files_are_written: call_case("relative");
    a_signal_handler_writes_to_the_descriptor_it_interrupts: call_case("handlers");
    threads_that_share_a_descriptor_lose_nothing: call_case("threads");
    bad_pointers_give_efault: call_case("bad-pointers");
    stdio_mixes_with_descriptors: call_case("stdio");
    asynchronous_writes_and_plain_ones_agree: call_case("asynchronous");
    fortified_calls_read_and_check: call_case("fortified");
    /// Proves S-stub-15.
    a_limit_of_the_file_size_holds: call_case("limits");
    readers_see_what_was_written_and_every_change: call_case("readers");
    a_reader_sees_every_change_of_a_file_that_was_at_rest: call_case("lists");
    offsets_beyond_four_gigabytes_are_kept: call_case("huge-offsets");
    /// Proves S-direct-5.
    regression_buffers_bad_at_either_end_give_what_the_kernel_gives: call_case("bad-buffers");
    /// Proves S-direct-6.
    regression_a_size_that_was_not_asked_for_is_right_or_not_told: call_case("statx-of-nothing");

    /// Proves S-direct-9, S-stub-1.
    random_operations_answer_as_in_a_plain_directory_and_end_in_the_backing: run_random_operations();
    calls_of_more_than_two_gigabytes_are_cut_as_by_the_kernel: make_long_calls();
    replacements_of_malloc_stand_before_and_behind_the_library: replace_malloc();
    large_and_small_writes_and_reads_go_by_direct_access: write_and_read_all_directly();
    /// Proves S-stub-1.
    streams_of_cpp_are_written_and_read: run_streams();
    /// Proves S-stub-1.
    shells_redirect_and_keep_descriptors: run_shell();
    /// Proves S-stub-1.
    python_writes_and_starts_programs: run_python();
    /// Proves S-stub-14.
    regression_node_finds_sizes_and_bytes_of_files: run_node();
    /// Proves S-direct-10.
    regression_a_descriptor_that_another_process_takes_has_no_offset: take_descriptor();
    /// Proves S-stub-1.
    tar_packs_and_unpacks: run_tar();
    /// Proves S-stub-1.
    fortran_writes_records_of_every_kind: run_fortran();
    /// Proves S-stub-1.
    a_database_keeps_its_locks_and_its_rows: run_sqlite();
    /// Proves S-stub-7.
    arrays_of_numpy_and_h5py_are_whole: write_arrays();
    /// Proves S-stub-7: needs PyTorch, which not every release of Debian and Ubuntu has.
    tensors_of_pytorch_and_safetensors_are_whole: write_tensors();
    /// Proves S-stub-1.
    an_mpi_program_writes_one_file_a_rank_and_one_for_all: run_mpi();
}

/// A case of `preload.c`. What is read back is drained in the first round, and in the arena in the others; on a mount
/// direct access begins in the middle of small files in the last one.
fn call_case(frontend: Frontend, case: &str) {
    let program = call_cases(program_dir());
    let held = "close=held,drain=demand";
    let rounds = match frontend {
        Frontend::Mount => vec![("", "0"), (held, "0"), (held, "20000")],
        Frontend::Tree => vec![("", "0"), (held, "0")],
    };
    for (options, direct_after) in rounds {
        frontend.same_as_plain(case, &patient(options), |dir| {
            let mut command = Command::new(program);
            command.arg(dir).arg(case).env(DIRECT_AFTER, direct_after);
            command
        });
    }
}

fn run_random_operations(frontend: Frontend) {
    let seed = seed("differential");
    let sandbox = Sandbox::new("differential");
    let plain = sandbox.mkdir("plain");
    let mount = frontend.mount(&sandbox, &patient("drain=demand"));
    for round in 0..4u64 {
        let mut command = Command::new("/usr/bin/python3");
        command
            .arg(source("differential.py"))
            .arg((seed % 1_000_000 + round).to_string())
            .arg("1500");
        let done = run(frontend.preload(&sandbox, command.arg(mount.path()).arg(&plain))).ok();
        assert!(done.stdout.starts_with("same"), "{done}");
    }
    frontend.assert_shows(&mount, &plain);
    let backing = mount.umount();
    assert_same("the backing", &snapshot(&backing), &snapshot(&plain));
}

/// The kernel takes 2 GiB less a page in one call.
fn make_long_calls(frontend: Frontend) {
    if !has_memory_gib(6, 3) {
        return;
    }
    let sandbox = Sandbox::new("longs");
    let options = "memory=2304M,chunk-size=4M,drain=demand,populate=no";
    let mount = frontend.mount(&sandbox, options);
    let mut command = Command::new(call_cases(program_dir()));
    let outcome = run(frontend.preload(&sandbox, command.arg(mount.path()).arg("longs"))).ok();
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
    if frontend == Frontend::Mount {
        assert!(direct_bytes(&outcome, "write") > 2_000_000_000, "{outcome}");
    }
    fs::remove_file(mount.join("longs")).expect("unlink");
    mount.umount();
}

/// Their own start calls hooks before the library has started, and every hook may find them in its way.
fn replace_malloc(frontend: Frontend) {
    let library = preload_library();
    let library = library.display();
    for malloc in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"] {
        for both in [format!("{malloc}:{library}"), format!("{library}:{malloc}")] {
            let sandbox = Sandbox::new("malloc");
            let plain = sandbox.mkdir("plain");
            let mount = frontend.mount(&sandbox, &patient("close=held,drain=demand"));
            for case in [
                "sizes", "forks", "vforks", "spawns", "threads", "handlers", "stdio",
            ] {
                let program = |dir: &Path| {
                    let mut command = Command::new(call_cases(program_dir()));
                    command.arg(dir).arg(case);
                    command
                };
                let expected = run(&mut program(&plain)).ok();
                let mut command = program(mount.path());
                let found = run(frontend
                    .preload(&sandbox, &mut command)
                    .env("LD_PRELOAD", &both));
                assert_same_outcome(&found, &expected);
                assert!(!found.stderr.contains("cannot be preloaded"), "{found}");
                assert!(found.stderr.contains("firn"), "{both}, {case}: {found}");
            }
            frontend.assert_shows(&mount, &plain);
            let backing = mount.umount();
            assert_same("the backing", &snapshot(&backing), &snapshot(&plain));
        }
    }
}

fn write_and_read_all_directly(frontend: Frontend) {
    let sandbox = Sandbox::new("directly");
    // A file that moves into a memory file meanwhile ends a list, and one call is the kernel's.
    let mount = frontend.mount(&sandbox, &patient("close=held,drain=demand,memory-files=0"));
    let run_script = |script: &str| {
        let mut command = python(script, mount.path());
        run(frontend.preload(&sandbox, &mut command)).ok()
    };
    let wrote = run_script(
        "import os, sys; os.chdir(sys.argv[1]); f = os.open('large', os.O_CREAT | os.O_WRONLY)
block = bytes(range(256)) * 4096
for i in range(20): os.write(f, block)
os.close(f); f = os.open('small', os.O_CREAT | os.O_WRONLY)
for i in range(100000): os.write(f, b'%064d' % i)",
    );
    let expected = (20 << 20) + 6_400_000;
    assert_eq!(direct_bytes(&wrote, "write"), expected, "{wrote}");
    let got = run_script(
        "import os, sys; os.chdir(sys.argv[1]); f = os.open('large', os.O_RDONLY)
block = bytes(range(256)) * 4096
for i in range(20): assert os.read(f, 1 << 20) == block
assert os.read(f, 1 << 20) == b''
assert os.pread(f, 5000, 3 << 20) == block[:5000]
text = open('small', 'rb').read(); print(len(text))
assert all(int(text[i * 64:i * 64 + 64]) == i for i in range(100000))",
    );
    assert_eq!(got.stdout, "6400000\n");
    assert!(direct_bytes(&got, "read") >= expected, "{got}");
    assert_eq!(direct_bytes(&got, "pread"), 5000, "{got}");
    if frontend == Frontend::Mount {
        let text = String::from_utf8(read(&mount.join("small"))).expect("digits");
        assert!((0..100_000).all(|i| text[i * 64..(i + 1) * 64].parse() == Ok(i)));
        let mut off = shell("cat small > copy", mount.path());
        let off = frontend.preload(&sandbox, &mut off);
        assert_eq!(run(off.env("FIRN_PRELOAD", "off")).ok().stderr, "");
    }
    mount.umount();
}

fn run_streams(frontend: Frontend) {
    let program = compile("c++", "streams.cpp", &program_copy_dir(frontend));
    let outcome = frontend.same_as_plain("streams", &patient(""), |dir| {
        let mut command = Command::new(&program);
        command.arg(dir);
        command
    });
    let expected = match frontend {
        Frontend::Mount => 3_000_000,
        Frontend::Tree => 1_000_000,
    };
    let direct = direct_bytes(&outcome, "write") + direct_bytes(&outcome, "writev");
    assert!(direct > expected, "{outcome}");
}

/// A directory of one frontend's tests: two tests that compile into one place at once would disturb each other.
fn program_copy_dir(frontend: Frontend) -> PathBuf {
    let dir = program_dir().join(format!("{frontend:?}"));
    fs::create_dir_all(&dir).expect("mkdir");
    dir
}

fn run_shell(frontend: Frontend) {
    frontend.same_as_plain("bash", &patient(""), |dir| shell(SHELL, dir));
}

fn run_python(frontend: Frontend) {
    frontend.same_as_plain("python", &patient(""), |dir| {
        let mut command = python(PYTHON, dir);
        if frontend == Frontend::Tree {
            // Python maps what it compiled, and stubs are empty to the kernel.
            command.env("PYTHONDONTWRITEBYTECODE", "1");
        }
        command
    });
}

fn run_node(frontend: Frontend) {
    for options in ["", "close=held,drain=demand"] {
        frontend.same_as_plain("node", &patient(options), |dir| {
            let mut command = Command::new("node");
            command.args(["-e", NODE]).arg(dir);
            command
        });
    }
}

/// The kernel has no offset of a file that a process writes by direct access: a use of it there fails with an error.
fn take_descriptor(frontend: Frontend) {
    let sandbox = Sandbox::new("taken");
    let mount = frontend.mount(&sandbox, &patient("close=held,drain=demand"));
    let mut command = Command::new(call_cases(program_dir()));
    let outcome = run(frontend.preload(&sandbox, command.arg(mount.path()).arg("taken"))).ok();
    assert!(direct_bytes(&outcome, "write") >= 400_000, "{outcome}");
    let expected = [
        "write: Invalid argument",
        "read: Invalid argument",
        "child: 0",
        "offset: 400003",
        "size: 400003",
        "same: 1",
    ];
    assert_eq!(
        outcome.stdout.lines().collect::<Vec<_>>(),
        expected,
        "{outcome}"
    );
    mount.umount();
}

fn run_tar(frontend: Frontend) {
    let outcome = frontend.same_as_plain("tar", &patient(""), |dir| shell(TAR, dir));
    if frontend == Frontend::Mount {
        assert!(direct_bytes(&outcome, "write") > 1_000_000, "{outcome}");
    }
}

fn run_fortran(frontend: Frontend) {
    let program = compile("gfortran", "records.f90", &program_copy_dir(frontend));
    for options in [patient(""), patient("close=held,drain=demand")] {
        let outcome = frontend.same_as_plain("fortran", &options, |dir| {
            let mut command = Command::new(&program);
            command.arg(dir);
            command
        });
        assert!(direct_bytes(&outcome, "write") > 1_000_000, "{outcome}");
    }
}

/// The journal mode WAL needs a shared mapping, which a tree does not have.
fn run_sqlite(frontend: Frontend) {
    let modes = match frontend {
        Frontend::Mount => "DELETE WAL TRUNCATE PERSIST",
        Frontend::Tree => "DELETE TRUNCATE PERSIST",
    };
    frontend.same_as_plain("sqlite", &patient(""), |dir| {
        let mut command = shell(SQLITE, dir);
        command.env("MODES", modes);
        command
    });
}

/// Mappings of a tree are copies, and are not written.
fn write_arrays(frontend: Frontend) {
    let sandbox = Sandbox::new("h5py");
    let mount = frontend.mount(&sandbox, SMALL);
    let datasets = |verb: &str, file: PathBuf| {
        let mut command = Command::new("/usr/bin/python3");
        command.arg(source("datasets.py")).arg(verb).arg(file);
        command
    };
    for verb in ["write", "check"] {
        let mut command = datasets(verb, mount.join("model.h5"));
        run(frontend.preload(&sandbox, &mut command)).ok();
    }
    let common = "import errno, mmap, numpy as np, os, sys; d=sys.argv[1]
a=np.arange(3000000.0).reshape(6000,500)
np.save(d+'/a.npy', a); a.tofile(d+'/raw'); np.savez(d+'/b.npz', a=a, b=a.T)
assert (np.load(d+'/a.npy')==a).all() and (np.fromfile(d+'/raw')==a.ravel()).all()
for mode in 'r', 'c': assert (np.load(d+'/a.npy', mmap_mode=mode)==a).all()
assert (np.load(d+'/b.npz')['b'][0]==np.arange(6000)*500.0).all()
";
    let mappings = match frontend {
        Frontend::Mount => {
            "m=np.load(d+'/a.npy', mmap_mode='r+'); assert (m==a).all(); m[7]=1; m.flush(); a[7]=1
assert (np.load(d+'/a.npy')==a).all()"
        }
        Frontend::Tree => {
            "f=os.open(d+'/raw', os.O_RDWR); m=mmap.mmap(f, 8000, prot=mmap.PROT_READ); before=m[:8]
os.pwrite(f, b'changed!', 0); assert m[:8]==before and os.pread(f, 8, 0)==b'changed!'
os.pwrite(f, before, 0)
try: mmap.mmap(f, 8000); sys.exit('a writable shared mapping')
except OSError as e: assert e.errno == errno.ENODEV, e"
        }
    };
    let mut command = python(&format!("{common}{mappings}"), mount.path());
    run(frontend.preload(&sandbox, &mut command)).ok();
    if frontend == Frontend::Tree {
        frontend.assert_shows(&mount, sandbox.path());
    }
    let backing = mount.umount();
    run(&mut datasets("check", backing.join("model.h5"))).ok();
    assert_eq!(
        read(&backing.join("a.npy")).len(),
        read(&backing.join("raw")).len() + 128
    );
}

fn write_tensors(frontend: Frontend) {
    if !has_torch() {
        return;
    }
    let sandbox = Sandbox::new("torch");
    let options = "arena-size=64M,chunk-size=1M,close=held";
    let mount = frontend.mount(&sandbox, options);
    let tensors = |verb: &str, dir: &Path| {
        let mut command = Command::new("/usr/bin/python3");
        command.arg(source("tensors.py")).arg(verb).arg(dir);
        if frontend == Frontend::Tree {
            command.arg("unshared");
        }
        command.env("PYTHONPATH", python_packages());
        run(frontend.preload(&sandbox, &mut command)).ok()
    };
    let outcome = tensors("write", mount.path());
    let direct = direct_bytes(&outcome, "write") + direct_bytes(&outcome, "writev");
    if frontend == Frontend::Mount {
        assert!(direct > 1_000_000, "{outcome}");
    }
    tensors("check", mount.path());
    if frontend == Frontend::Tree {
        frontend.assert_shows(&mount, sandbox.path());
    }
    let backing = mount.umount();
    tensors("check", &backing);
}

fn run_mpi(frontend: Frontend) {
    let sandbox = Sandbox::new("mpi");
    let mount = frontend.mount(&sandbox, SMALL);
    for name in ["ranks.c", "shared.c"] {
        let program = sandbox.join(name.replace(".c", ""));
        let mut compiler = Command::new("mpicc");
        run(compiler.args(["-O1", "-o"]).arg(&program).arg(source(name))).ok();
        let mut mpirun = Command::new("mpirun");
        mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "4"]);
        if frontend == Frontend::Tree {
            sandbox.environment(&mut mpirun);
            mpirun.args(["-x", "FIRN_RUNTIME_DIR"]);
        }
        let library = format!("LD_PRELOAD={}", preload_library().display());
        mpirun.arg("-x").arg(library).arg(&program);
        let answer = run(mpirun.arg(mount.path()).arg("6")).ok();
        assert!(answer.stdout.contains("4 ranks agree"), "{answer}");
    }
    if frontend == Frontend::Tree {
        frontend.assert_shows(&mount, sandbox.path());
    }
    let backing = mount.umount();
    let size = |name: String| fs::metadata(backing.join(name)).expect("a file").len();
    for rank in 0..4 {
        assert_eq!(size(format!("rank.{rank}")), 6 << 20);
    }
    assert_eq!(size("shared".into()), 24 << 20);
}
