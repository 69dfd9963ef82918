//! MPI programs that write one file from four hosts: ROMIO, OMPIO, HDF5 and NetCDF-4 through mounts with `layout=log`.
//!
//! Each rank runs in a mount namespace of its own, where the job's directory is the mount of its host. What the ranks
//! wrote is read by other numbers of ranks, and compared with what one rank wrote in a plain directory.
//!
//! Needs root, FUSE and Debian's openmpi-bin, libnetcdf-mpi-dev, python3-h5py-mpi and python3-mpi4py, and ROMIO's own tests,
//! which `scripts/setup` builds.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::PoisonError;
use std::time::Duration;

use crate::ONE_JOB;
use firn_tests::command::{Outcome, run};
use firn_tests::fsops::{assert_becomes_plain, read};
use firn_tests::random::{env_count, generator};
use firn_tests::suite::tool;
use firn_tests::{FirnMount, Sandbox, seed, wait_until};
use rand::RngExt;

const HOSTS: usize = 4;
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,layout=log";
const PATTERNS: [&str; 3] = ["strided", "segmented", "nested"];
const ACCESSES: [&str; 2] = ["collective", "independent"];

/// The two implementations of MPI-IO in Open MPI, and how each is told to write nothing but the bytes it was given.
const LIBRARIES: [Library; 2] = [
    Library {
        component: "ompio",
        hints: &[],
    },
    Library {
        component: "romio321",
        hints: &["romio_ds_write=disable"],
    },
];

struct Library {
    /// Of Open MPI's framework `io`.
    component: &'static str,
    hints: &'static [&'static str],
}

/// Source of a program of these tests.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
}

/// Compiles one of them into the sandbox.
fn compile(sandbox: &Sandbox, name: &str, flags: &str) -> PathBuf {
    let program = sandbox.join(name);
    let script = format!(r#"mpicc -O1 -Wall -Werror -o "$0" "$1" {flags}"#);
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(&program);
    run(command.arg(source(&format!("{name}.c")))).ok();
    program
}

/// Hosts of a job, each with a directory that shows the same files.
struct Hosts<'a> {
    shared: &'a Sandbox,
    /// Where every rank finds the directory of its host.
    common: PathBuf,
    dirs: Vec<PathBuf>,
}

impl<'a> Hosts<'a> {
    fn new(shared: &'a Sandbox, dirs: Vec<PathBuf>) -> Self {
        let common = shared.mkdir("common");
        Self {
            shared,
            common,
            dirs,
        }
    }

    /// Hosts that have one plain directory.
    fn plain(shared: &'a Sandbox) -> Self {
        Self::new(shared, vec![shared.mkdir("plain"); HOSTS])
    }

    /// The first `count` of them.
    fn first(&self, count: usize) -> Self {
        Self {
            shared: self.shared,
            common: self.common.clone(),
            dirs: self.dirs[..count].to_vec(),
        }
    }

    /// `mpirun` of a program and its arguments with `ranks` ranks, dealt out to the hosts.
    fn run<S: AsRef<OsStr>>(&self, component: &str, ranks: usize, words: &[S]) -> Outcome {
        let mut command = self.command(component, ranks, words);
        let _alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
        run(&mut command)
    }

    fn command<S: AsRef<OsStr>>(&self, component: &str, ranks: usize, words: &[S]) -> Command {
        let mut command = Command::new("mpirun");
        self.shared.environment(&mut command);
        command
            .args(["--allow-run-as-root", "--oversubscribe", "-n"])
            .arg(ranks.to_string())
            .args(["--mca", "io", component])
            .args(["--mca", "fbtl_posix_write_datasieving", "false"])
            .env("ROMIO_HINTS", self.hints())
            .env("OMP_NUM_THREADS", "1")
            .arg(source("on_host.sh"))
            .arg(&self.common)
            .args(&self.dirs)
            .arg("--")
            .args(words);
        command
    }

    /// What ROMIO is told where the program has no hints of its own: libraries between it and the program.
    fn hints(&self) -> PathBuf {
        let file = self.shared.join("romio-hints");
        fs::write(&file, "romio_ds_write disable\n").expect("write the hints");
        file
    }

    /// The same, where the ranks have to agree.
    #[track_caller]
    fn agree<S: AsRef<OsStr>>(&self, component: &str, ranks: usize, words: &[S]) {
        let outcome = self.run(component, ranks, words).ok();
        let agreed = format!("{ranks} ranks agree");
        assert!(outcome.stdout.contains(&agreed), "{outcome}");
    }

    /// Path of a file as the ranks see it.
    fn file(&self, name: &str) -> String {
        self.common.join(name).to_string_lossy().into_owned()
    }
}

/// What a program and its arguments write with one rank in a plain directory; they are given the file.
fn written_by_one(shared: &Sandbox, words: impl FnOnce(String) -> Vec<String>) -> Vec<u8> {
    let file = shared.join("of-one").to_string_lossy().into_owned();
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "-n", "1"])
        .args(words(file.clone()));
    let alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    run(&mut command).ok();
    drop(alone);
    let bytes = read(Path::new(&file));
    fs::remove_file(&file).expect("remove");
    bytes
}

/// Writes a file with each library, pattern and access, and reads it with other numbers of ranks; `arrived` is where
/// it is then.
fn write_and_read(hosts: &Hosts<'_>, arrived: &Path) {
    let program = compile(hosts.shared, "mpi_io", "");
    let program = program.to_string_lossy().into_owned();
    let expected = written_by_one(hosts.shared, |file| {
        let words = [&program, "write", &file, "segmented", "collective"];
        words.map(str::to_owned).into()
    });
    for library in LIBRARIES {
        for pattern in PATTERNS {
            for access in ACCESSES {
                let name = format!("{}-{pattern}-{access}", library.component);
                let file = hosts.file(&name);
                let words = |verb: &str| {
                    let mut words = vec![program.clone(), verb.to_owned(), file.clone()];
                    words.extend([pattern, access].map(str::to_owned));
                    words.extend(library.hints.iter().map(|&hint| hint.to_owned()));
                    words
                };
                hosts.agree(library.component, HOSTS, &words("write"));
                for ranks in [3, 2] {
                    hosts.agree(library.component, ranks, &words("read"));
                }
                assert_becomes_plain(&arrived.join(&name), &expected);
            }
        }
    }
}

#[test]
fn mpi_io_of_four_ranks_is_right_on_a_plain_directory() {
    let shared = Sandbox::new("mpi-plain");
    let hosts = Hosts::plain(&shared);
    write_and_read(&hosts, &shared.join("plain"));
}

/// Mounts of four hosts over the `backing` of a sandbox, for the time of a call.
fn with_mounts(name: &str, check: impl FnOnce(&Hosts<'_>, &Path)) {
    let shared = Sandbox::new(name);
    let sandboxes: Vec<Sandbox> = (0..HOSTS)
        .map(|at| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}")))
        .collect();
    let backing = shared.join("backing");
    let mounts: Vec<FirnMount<'_>> = sandboxes
        .iter()
        .map(|host| FirnMount::over(host, &backing, OPTIONS))
        .collect();
    let dirs = mounts.iter().map(|mount| mount.path().to_owned());
    check(&Hosts::new(&shared, dirs.collect()), &backing);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    let containers = fs::read_dir(backing.join(".firn/log")).expect("list the logs");
    let names = containers.map(|entry| entry.expect("an entry").file_name());
    let left: Vec<_> = names
        .filter(|name| !name.to_string_lossy().starts_with("host-"))
        .collect();
    assert!(left.is_empty(), "logs are left: {left:?}");
}

/// Proves S-log-60, S-log-61.
#[test]
fn mpi_io_of_four_hosts_ends_in_the_file_of_one() {
    with_mounts("mpi-log", write_and_read);
}

/// How all ranks set the size of a file (`mpi_io.c`), as IOR, ROMIO's tests and many libraries do.
const SIZES: [&str; 5] = ["zero", "truncated", "grown", "preallocated", "cut"];

/// Ranks and hosts.
const JOBS: [(usize, usize); 4] = [(2, 2), (4, 2), (4, 4), (8, 4)];

/// Proves S-log-60, S-log-64.
#[test]
fn a_file_whose_size_all_ranks_set_has_the_bytes_of_all() {
    with_mounts("mpi-size", |hosts, backing| {
        let program = compile(hosts.shared, "mpi_io", "");
        let program = program.to_string_lossy().into_owned();
        let expected = written_by_one(hosts.shared, |file| {
            let words = [&program, "write", &file, "segmented", "collective"];
            words.map(str::to_owned).into()
        });
        for library in LIBRARIES {
            for (number, size) in SIZES.iter().enumerate() {
                for (job, (ranks, count)) in JOBS.into_iter().enumerate() {
                    let pattern = PATTERNS[(number + job) % PATTERNS.len()];
                    let access = ACCESSES[(number + job) % ACCESSES.len()];
                    let name = format!("{}-{size}-{ranks}-{count}", library.component);
                    let mut words = vec![program.clone(), "write".to_owned(), hosts.file(&name)];
                    words.extend([pattern, access].map(str::to_owned));
                    words.push(format!("size={size}"));
                    words.extend(library.hints.iter().map(|&hint| hint.to_owned()));
                    hosts.first(count).agree(library.component, ranks, &words);
                    assert_becomes_plain(&backing.join(&name), &expected);
                }
            }
        }
    });
}

/// Hangs with OMPIO wherever the file lies.
const ATOMICITY: &str = "atomicity";

/// ROMIO's own tests, the number of ranks that each is for, and the option with which it is told the file, if any. The
/// others of them are left out: `large_array` and `large_file` write gigabytes, `big_extents`, `external32`, `error` and
/// `syshints` test the library and no file system, and `types_with_zeros` fails in Open MPI wherever the file lies.
/// `shared_fp` reads what other ranks wrote without `MPI_File_sync`, which MPI does not allow: `mpi_shared.c` does the same with it.
const ROMIO_TESTS: [(&str, usize, &[&str]); 19] = [
    (ATOMICITY, 4, &["-fname"]),
    ("aggregation1", 4, &["-f"]),
    ("aggregation2", 4, &[]),
    ("async", 4, &["-fname"]),
    ("coll_perf", 4, &["-fname"]),
    ("coll_test", 4, &["-fname"]),
    ("creat_excl", 4, &["-fname"]),
    ("darray_read", 4, &[]),
    ("excl", 4, &["-fname"]),
    ("hindexed", 4, &[]),
    ("i_noncontig", 2, &["-fname"]),
    ("noncontig", 2, &["-fname"]),
    ("noncontig_coll", 2, &["-fname"]),
    ("noncontig_coll2", 4, &["-fname"]),
    ("ordered_fp", 4, &["-fname"]),
    ("perf", 4, &["-fname"]),
    ("psimple", 4, &["-fname"]),
    ("split_coll", 4, &["-fname"]),
    ("status", 4, &["-fname"]),
];

/// Proves S-log-44, S-log-60.
#[test]
fn romios_own_tests_find_nothing_on_four_hosts() {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/romio");
    assert!(
        programs.is_dir(),
        "{} is not there: run scripts/setup",
        programs.display()
    );
    with_mounts("mpi-romio", |hosts, _| {
        let elsewhere = hosts.shared.mkdir("elsewhere");
        for library in LIBRARIES {
            for (program, ranks, option) in ROMIO_TESTS {
                if (library.component, program) == ("ompio", ATOMICITY) {
                    continue;
                }
                let file = hosts.file(&format!("{}-{program}", library.component));
                let program = programs.join(program).to_string_lossy().into_owned();
                let words = [&[program.as_str()], option, &[file.as_str()]].concat();
                let mut command = hosts.command(library.component, ranks, &words);
                let alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
                let outcome = run(command.current_dir(&elsewhere)).ok();
                drop(alone);
                let says =
                    |what: &str| outcome.stdout.contains(what) || outcome.stderr.contains(what);
                // Those that measure say how fast it was.
                assert!(
                    says("No Errors") || says("bandwidth"),
                    "{program}: {outcome}"
                );
            }
        }
        // One that understands its arguments otherwise tests a file beside the mounts.
        let beside = fs::read_dir(&elsewhere).expect("list").count();
        assert_eq!(beside, 0);
    });
}

/// What IOR is asked for, beside its check of what it wrote and read: each through MPI-IO and POSIX.
const IOR_RUNS: [&[&str]; 3] = [&[], &["-C"], &["-c"]];

/// IOR, where there is one: `scripts/setup` does not bring it (docs/TESTING.md says where it is from). What it calls is in
/// the tests above.
///
/// Proves S-log-60.
#[test]
fn ior_finds_every_byte_that_it_wrote_from_four_hosts() {
    let ior = tool("ior");
    if Command::new(&ior).arg("-h").output().is_err() {
        println!("no IOR: not run");
        return;
    }
    let ior = ior.to_string_lossy().into_owned();
    with_mounts("mpi-ior", |hosts, _| {
        let ways = LIBRARIES.map(|library| (library.component, "MPIIO"));
        for (component, api) in ways.into_iter().chain([("ompio", "POSIX")]) {
            for (number, more) in IOR_RUNS.into_iter().enumerate() {
                if api == "POSIX" && more.contains(&"-c") {
                    continue;
                }
                for (ranks, count) in JOBS {
                    let file = hosts.file(&format!("{component}-{api}-{number}-{ranks}-{count}"));
                    let mut words = vec![ior.as_str(), "-a", api, "-o", &file];
                    words.extend("-w -W -r -R -t 16k -b 64k -s 3".split(' '));
                    words.extend(more);
                    let outcome = hosts.first(count).run(component, ranks, &words).ok();
                    let is_told =
                        |what: &str| outcome.stdout.contains(what) || outcome.stderr.contains(what);
                    assert!(!is_told("ERROR") && !is_told("incorrect"), "{outcome}");
                }
            }
        }
    });
}

/// Bytes of a block of `mpi_kill.c`.
const BLOCK: usize = 5000;

/// The byte at a place of the file.
fn byte_of_ranks(place: u64) -> u8 {
    (place.wrapping_mul(2_654_435_761) >> 13) as u8 | 1
}

/// How many writes of each rank have returned.
fn count_returned(logs: &Path, ranks: usize) -> Vec<u64> {
    let bytes = |rank: usize| fs::metadata(logs.join(rank.to_string())).map_or(0, |log| log.len());
    (0..ranks).map(|rank| bytes(rank) / 4).collect()
}

/// kill -9 of the firnd of some of four hosts while ranks on all of them write one file whose size all have set. When they
/// have come back, every write that had returned is there.
///
/// Proves S-log-16, S-log-64.
#[test]
fn every_write_of_ranks_that_returned_survives_kill_9_of_firnd() {
    const RANKS: usize = 8;
    let seed = seed("mpi_io::kill");
    let mut random = generator(seed);
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 2) {
        let shared = Sandbox::new("mpi-kill");
        let program = compile(&shared, "mpi_kill", "");
        let sandboxes: Vec<Sandbox> = (0..HOSTS)
            .map(|at| Sandbox::on_host(&format!("mpi-kill{at}"), &format!("n{at}")))
            .collect();
        let backing = shared.join("backing");
        let mount = |host: usize| FirnMount::over(&sandboxes[host], &backing, OPTIONS);
        let mut mounts: Vec<_> = (0..HOSTS).map(|host| Some(mount(host))).collect();
        let dirs = mounts.iter().flatten();
        let hosts = Hosts::new(&shared, dirs.map(|mount| mount.path().to_owned()).collect());
        let (logs, stop) = (shared.mkdir("logs"), shared.join("stop"));
        let library = &LIBRARIES[random.random_range(0..LIBRARIES.len())];
        let way = ["zero", "preallocated"][random.random_range(0..2)];
        let file = hosts.file("shared");
        let words = [
            program.as_os_str(),
            file.as_ref(),
            logs.as_os_str(),
            stop.as_os_str(),
            way.as_ref(),
        ];
        let alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
        let mut job = hosts.command(library.component, RANKS, &words);
        let mut job = job
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("mpirun");
        wait_until("all ranks write", Duration::from_secs(120), || {
            count_returned(&logs, RANKS).iter().all(|count| *count > 5)
        });
        let dead: Vec<usize> = (0..HOSTS).filter(|_| random.random()).collect();
        for host in &dead {
            std::thread::sleep(Duration::from_micros(random.random_range(0..50_000)));
            mounts[*host].take().expect("a mount").kill();
        }
        // Some come back while others write on.
        let returns_late: bool = random.random();
        if !returns_late {
            dead.iter()
                .for_each(|host| mounts[*host] = Some(mount(*host)));
        }
        fs::write(&stop, "").expect("stop");
        let _ = job.wait().expect("mpirun");
        drop(alone);
        let counts = count_returned(&logs, RANKS);
        if returns_late {
            dead.iter()
                .for_each(|host| mounts[*host] = Some(mount(*host)));
        }
        mounts
            .into_iter()
            .flatten()
            .for_each(|mount| drop(mount.umount()));
        let args = ["flatten", "--all", "--backing"].map(Path::new);
        sandboxes[0].run([&args[..], &[&backing]].concat()).ok();
        let bytes = read(&backing.join("shared"));
        for (rank, &count) in counts.iter().enumerate() {
            for number in 0..count {
                let start = (number * RANKS as u64 + rank as u64) * BLOCK as u64;
                let expected = (start..start + BLOCK as u64).map(byte_of_ranks);
                let found = bytes.get(start as usize..start as usize + BLOCK);
                assert!(
                    found.is_some_and(|found| expected.eq(found.iter().copied())),
                    "seed {seed}, round {round}: block {number} of rank {rank}, killed {dead:?}, {way}, {}",
                    library.component
                );
            }
        }
        println!(
            "round {round}: {}, {way}, killed {dead:?}: {} writes",
            library.component,
            counts.iter().sum::<u64>()
        );
    }
}

/// Proves S-log-62.
#[test]
fn hdf5_of_four_hosts_has_what_one_host_would_have_written() {
    let script = source("mpi_h5.py").to_string_lossy().into_owned();
    let words = |verb: &str, file: &str, access: &str| -> Vec<String> {
        ["/usr/bin/python3", &script, verb, file, access]
            .map(str::to_owned)
            .into()
    };
    let list = |file: &Path| {
        let mut command = Command::new("/usr/bin/python3");
        run(command.arg(&script).arg("list").arg(file)).ok();
    };
    let plain = Sandbox::new("mpi-h5-plain");
    let expected = written_by_one(&plain, |file| words("write", &file, "collective"));
    with_mounts("mpi-h5", |hosts, backing| {
        for library in LIBRARIES {
            for access in ACCESSES {
                let name = format!("{}-{access}.h5", library.component);
                let file = hosts.file(&name);
                hosts.agree(library.component, HOSTS, &words("write", &file, access));
                for ranks in [3, 2] {
                    hosts.agree(library.component, ranks, &words("read", &file, access));
                }
                assert_becomes_plain(&backing.join(&name), &expected);
                list(&backing.join(&name));
            }
        }
    });
}

/// Proves S-log-62.
#[test]
fn netcdf_of_four_hosts_is_read_by_other_numbers_of_ranks() {
    const FLAGS: &str = "-I/usr/lib/$(gcc -print-multiarch)/netcdf/mpi/include -lnetcdf_mpi";
    with_mounts("mpi-nc", |hosts, backing| {
        let program = compile(hosts.shared, "mpi_nc", FLAGS);
        let program = program.to_string_lossy().into_owned();
        for access in ACCESSES {
            let words = |verb: &str, file: String| {
                vec![program.clone(), verb.to_owned(), file, access.to_owned()]
            };
            let expected = written_by_one(hosts.shared, |file| words("write", file));
            for library in LIBRARIES {
                let name = format!("{}-{access}.nc", library.component);
                let file = hosts.file(&name);
                hosts.agree(library.component, HOSTS, &words("write", file.clone()));
                for ranks in [3, 2] {
                    hosts.agree(library.component, ranks, &words("read", file.clone()));
                }
                assert_becomes_plain(&backing.join(&name), &expected);
                // Without Firn.
                let plain = Hosts::new(hosts.shared, vec![backing.to_owned()]);
                plain.agree(library.component, 1, &words("read", file));
            }
        }
    });
}
