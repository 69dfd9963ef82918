//! Programs that know nothing of Firn, while firnd is killed again and again: they see no error, and what they check holds.
//!
//! `FIRN_TAKEOVER_KILLS` sets the kills under each program (`cargo xtask campaign takeover`), `FIRN_SEED` the seed.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_tests::random::{env_count, generator};
use firn_tests::suite::{pjdfstest, tool};
use firn_tests::{FirnMount, Sandbox, run, seed};
use rand::RngExt;

const KILLS_DEFAULT: u64 = 4;
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,takeover=auto";

/// Runs `script` in the mount until it has lived through all kills; `$STOP` is there from then on, and it is to end. Gives
/// the backing, after the unmount, to `check`.
fn live_through_kills(name: &str, script: &str, check: impl FnOnce(&Path)) {
    live_through_kills_of(name, OPTIONS, script, check);
}

/// The slowest programs are left to the campaign.
fn is_campaign() -> bool {
    env_count("FIRN_TAKEOVER_KILLS", 0) > 0
}

fn live_through_kills_of(name: &str, options: &str, script: &str, check: impl FnOnce(&Path)) {
    let seed = seed(&format!("takeover under {name}"));
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("programs");
    let mut mount = FirnMount::new(&sandbox, options);
    let stop = sandbox.join("stop");
    let scratch = sandbox.join("scratch");
    fs::create_dir(&scratch).expect("mkdir");
    let mut program = Command::new("bash");
    program
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(mount.path())
        .env("STOP", &stop)
        .env("SCRATCH", &scratch)
        .env("FSX", tool("fsx"))
        .env("PJDFSTEST", tool("pjdfstest"))
        .env(
            "PROGRAMS",
            Path::new(env!("CARGO_MANIFEST_DIR")).join("programs"),
        )
        .env("SEED", (seed % 1_000_000).to_string());
    let mut program = program.spawn().expect("bash");
    let kills = env_count("FIRN_TAKEOVER_KILLS", KILLS_DEFAULT);
    let mut pauses = Vec::new();
    for number in 0..kills {
        mount.note_progress();
        // The random moment is the point of the test, not a wait for a condition.
        std::thread::sleep(Duration::from_millis(rng.random_range(100..700)));
        mount.kill_and_go_on();
        pauses.push(mount.status().takeover_last_seconds);
        let ended = program.try_wait().expect("wait");
        assert!(
            ended.is_none(),
            "{name} ended after kill {number}: {ended:?}"
        );
    }
    mount.note_progress();
    fs::write(&stop, "").expect("write");
    let ended = program.wait().expect("wait");
    assert!(
        ended.success(),
        "{name} ended with {ended} after {kills} kills"
    );
    let status = mount.status();
    assert_eq!((status.takeovers, status.lost_open_files), (kills, 0));
    check(&mount.umount());
    pauses.sort_by(f64::total_cmp);
    let ms = |at: usize| pauses.get(at).map_or(0.0, |pause| pause * 1e3);
    println!(
        "{name}: {kills} kills, pause p50 {:.0} ms, max {:.0} ms",
        ms(pauses.len() / 2),
        ms(pauses.len().saturating_sub(1))
    );
}

/// Proves S-crash-11.
#[test]
fn git_commits_clones_and_checks_go_on() {
    let script = r#"
        git init -q repo && cd repo
        git config user.email a@b && git config user.name a
        n=0
        while [ ! -e "$STOP" ]; do
            n=$((n + 1))
            mkdir -p dir$n && for m in 1 2 3 4 5 6 7 8; do echo "$n $m" > dir$n/file$m; done
            git add -A && git commit -qm "commit $n"
            git clone -q . ../copy && git -C ../copy fsck --strict && diff -r --exclude=.git . ../copy
            rm -rf ../copy
        done
        git fsck --strict
        git clone -q . ../copy
    "#;
    live_through_kills("git", script, |backing| {
        let copy = backing.join("copy");
        run(Command::new("git")
            .arg("-C")
            .arg(copy)
            .args(["fsck", "--strict"]))
        .ok();
    });
}

/// A database that commits rows one by one, and the check that each commit that returned is there.
const DATABASE: &str = r#"
import os, sqlite3, sys
journal, stop, scratch = sys.argv[1], os.environ["STOP"], os.environ["SCRATCH"]
base = sqlite3.connect("base.db", timeout=60)
base.execute(f"pragma journal_mode={journal}")
base.execute("pragma synchronous=full")
base.execute("create table rows (number integer primary key, bytes blob)")
base.commit()
count = 0
while not os.path.exists(stop):
    base.execute("insert into rows values (?, ?)", (count, os.urandom(2000)))
    base.commit()
    count += 1
    if count % 10 == 0:
        found = base.execute("select count(*) from rows").fetchone()[0]
        assert found == count, (found, count)
assert base.execute("pragma integrity_check").fetchone()[0] == "ok"
base.close()
again = sqlite3.connect("base.db")
assert again.execute("select count(*) from rows").fetchone()[0] == count
with open(os.path.join(scratch, "count"), "w") as f:
    f.write(str(count))
print(journal, count, "rows")
"#;

fn run_database(journal: &str) {
    let script = format!("python3 - {journal} <<'END'\n{DATABASE}\nEND\n");
    live_through_kills(&format!("sqlite, {journal}"), &script, |backing| {
        let base = backing.join("base.db");
        let checked = run(Command::new("sqlite3")
            .arg(base)
            .arg("pragma integrity_check"));
        assert_eq!(checked.ok().stdout.trim(), "ok");
    });
}

/// Proves S-crash-11.
#[test]
fn a_database_with_a_rollback_journal_goes_on() {
    run_database("delete");
}

/// Its shared memory is a mapping of a file in the mount.
///
/// Proves S-crash-11.
#[test]
fn a_database_with_a_write_ahead_log_goes_on() {
    run_database("wal");
}

/// Proves S-crash-11, S-mmap-1.
#[test]
fn fsx_with_mappings_finds_the_bytes_that_it_wrote() {
    let script = r#"
        printf '%s\n' 'nomsyncafterwrite = true' '[opsize]' 'min = 1' '[weights]' \
            'read = 10' 'write = 10' 'mapread = 10' 'mapwrite = 10' 'truncate = 5' 'close_open = 3' \
            'invalidate = 1' 'fsync = 0.2' 'fdatasync = 0.2' 'punch_hole = 3' 'sendfile = 3' \
            'posix_fallocate = 2' 'posix_fadvise = 1' 'copy_file_range = 5' > "$SCRATCH/fsx.toml"
        n=0
        while [ ! -e "$STOP" ]; do
            n=$((n + 1))
            "$FSX" -f "$SCRATCH/fsx.toml" -S $((SEED + n)) -N 3000 -P "$SCRATCH" file \
                > "$SCRATCH/out" 2>&1 || { tail -40 "$SCRATCH/out"; exit 1; }
        done
        echo "fsx: $n runs of 3000 operations"
    "#;
    live_through_kills("fsx", script, |_| {});
}

/// Proves S-crash-11.
#[test]
fn a_shell_that_works_in_the_mount_goes_on() {
    let script = r#"
        mkdir work && cd work
        n=0
        while [ ! -e "$STOP" ]; do
            n=$((n + 1))
            mkdir -p a/b && cd a/b
            echo "$n" > one && cp one two && mv two three && ln three four && ln -s four five
            [ "$(cat five)" = "$n" ]
            echo more >> one && [ "$(wc -l < one)" = 2 ]
            chmod 640 one && touch -d @1000000000 one
            [ "$(stat -c %a:%Y one)" = 640:1000000000 ]
            cd ../.. && mv a c && [ "$(ls c/b | tr '\n' ' ')" = "five four one three " ]
            echo "$n" >> count
            rm -r c
        done
        [ "$(wc -l < count)" = "$n" ]
        echo "shell: $n rounds"
    "#;
    live_through_kills("shell", script, |backing| {
        assert!(backing.join("work/count").is_file());
        assert!(!backing.join("work/c").exists());
    });
}

/// Files of `tempfile` have no name from their first moment on.
const TEMPORARY_FILES: &str = r#"
import os, random, tempfile
stop, scratch = os.environ["STOP"], os.environ["SCRATCH"]
rng, count = random.Random(int(os.environ["SEED"])), 0
while not os.path.exists(stop):
    count += 1
    with tempfile.TemporaryFile(dir=".") as one, tempfile.SpooledTemporaryFile(max_size=100, dir=".") as two:
        data = rng.randbytes(rng.randrange(1, 300000))
        for file in (one, two):
            file.write(data)
        one.flush()
        one.truncate(len(data) // 2)
        one.seek(0)
        assert one.read() == data[: len(data) // 2]
        two.seek(0)
        assert two.read() == data
print("temporary files:", count, "rounds")
"#;

/// Proves S-crash-11.
#[test]
fn a_program_with_temporary_files_goes_on() {
    let script = format!("python3 - <<'END'\n{TEMPORARY_FILES}\nEND\n");
    live_through_kills("temporary files", &script, |_| {});
}

/// Proves S-crash-11.
#[test]
fn a_build_goes_on() {
    let script = r#"
        printf 'all: program\nOBJECTS = %s\nprogram: $(OBJECTS)\n\tcc -o $@ $^\n%%.o: %%.c\n\tcc -c -o $@ $<\n' \
            "$(seq -s ' ' -f 'f%g.o' 1 12) main.o" > Makefile
        for n in $(seq 1 12); do echo "int f$n(void) { return $n; }" > f$n.c; done
        { for n in $(seq 1 12); do echo "int f$n(void);"; done
          echo 'int main(void) { return 0'; for n in $(seq 1 12); do echo "+ f$n()"; done; echo '- 78; }'; } > main.c
        n=0
        while [ ! -e "$STOP" ]; do
            n=$((n + 1))
            make -s -j2 && ./program
            rm -f -- *.o program
        done
        echo "build: $n builds"
    "#;
    live_through_kills("build", script, |_| {});
}

/// Four ranks write a file each, and one file through MPI-IO, and read what their neighbours wrote.
///
/// Proves S-crash-11.
#[test]
fn mpi_programs_with_romio_go_on() {
    let script = r#"
        for name in ranks shared; do mpicc -O1 -o "$SCRATCH/$name" "$PROGRAMS/$name.c"; done
        n=0
        while [ ! -e "$STOP" ]; do
            n=$((n + 1))
            for name in ranks shared; do
                mpirun --allow-run-as-root --oversubscribe -n 4 --mca io romio321 \
                    "$SCRATCH/$name" "$PWD" 2 > "$SCRATCH/out" 2>&1 || { tail -20 "$SCRATCH/out"; exit 1; }
                grep -q "4 ranks agree" "$SCRATCH/out"
            done
            rm -f rank.* shared
        done
        echo "MPI: $n rounds"
    "#;
    live_through_kills("MPI", script, |_| {});
}

/// The result of a solver that lived through kills is that of one beside the mount, bit for bit.
///
/// Proves S-crash-11.
#[test]
fn a_solver_that_checkpoints_goes_on_to_the_same_result() {
    let script = r#"
        solve() {
            OMP_NUM_THREADS=1 lmp -log none -screen none -in "$PROGRAMS/melt.in" \
                -var out "$1/out" -var ck "$1" -var fresh 1 -var from none > /dev/null
        }
        mkdir "$SCRATCH/plain" && solve "$SCRATCH/plain" & plain=$!
        n=0
        while [ $n = 0 ] || [ ! -e "$STOP" ]; do
            n=$((n + 1))
            mkdir run && solve run
            [ $n -gt 1 ] || wait $plain
            cmp run/out "$SCRATCH/plain/out"
            for file in run/melt.*.restart; do cmp "$file" "$SCRATCH/plain/${file#run/}"; done
            rm -r run
        done
        echo "LAMMPS: $n runs"
    "#;
    live_through_kills("LAMMPS", script, |_| {});
}

/// A loop that saves its state by a temporary file and a rename, and goes on from what it reads back.
const TRAINING: &str = r#"
import hashlib, mmap, os, pickle, random
stop, scratch = os.environ["STOP"], os.environ["SCRATCH"]
random.seed(int(os.environ["SEED"]))
state, step = {"weights": [0.0] * 20000, "history": []}, 0
data = open("data", "w+b")
data.truncate(1 << 20)
batch = mmap.mmap(data.fileno(), 1 << 20)
log = open("log.jsonl", "a")
while not os.path.exists(stop):
    step += 1
    at = random.randrange(0, 1 << 20, 4096)
    batch[at:at + 4096] = bytes([step % 251]) * 4096
    state["weights"] = [w + random.random() for w in state["weights"]]
    state["history"].append(step)
    assert batch[at] == step % 251
    log.write(f"{step}\n"); log.flush()
    if step % 3 == 0:
        name = f"checkpoint-{step}"
        os.mkdir(name)
        blob = pickle.dumps(state)
        with open(f"{name}/state.tmp", "wb") as file:
            file.write(blob); file.flush(); os.fsync(file.fileno())
        os.rename(f"{name}/state.tmp", f"{name}/state")
        read = open(f"{name}/state", "rb").read()
        assert hashlib.sha256(read).digest() == hashlib.sha256(blob).digest()
        state = pickle.loads(read)
        assert state["history"] == list(range(1, step + 1))
        old = f"checkpoint-{step - 6}"
        if os.path.exists(old):
            os.remove(f"{old}/state"); os.rmdir(old)
assert [int(line) for line in open("log.jsonl")] == list(range(1, step + 1))
batch.close()
print("training:", step, "steps")
"#;

/// Proves S-crash-11, S-mmap-2.
#[test]
fn a_training_loop_goes_on() {
    let script = format!("python3 - <<'END'\n{TRAINING}\nEND\n");
    live_through_kills("training", &script, |backing| {
        assert!(backing.join("log.jsonl").is_file());
    });
}

/// A server with its own discipline of fsync, its log and its processes; a client checks that each commit that returned is
/// there, and the server's own check of its blocks finds nothing.
///
/// Proves S-crash-11.
#[test]
fn a_database_server_goes_on() {
    let script = r#"
        as_server() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
        mkdir base && chown postgres: base && chmod 700 base
        as_server initdb -k -D base > "$SCRATCH/init" 2>&1 || { tail -20 "$SCRATCH/init"; exit 1; }
        mkdir "$SCRATCH/socket" && chmod 711 "$SCRATCH" && chown postgres: "$SCRATCH/socket"
        # Not the function: the number of the job is to be the server's.
        setpriv --reuid=postgres --regid=postgres --clear-groups postgres -D base -h '' -k "$SCRATCH/socket" > "$SCRATCH/server" 2>&1 &
        server=$!
        end() { kill -INT $server 2> /dev/null || true; wait $server || true; }
        trap end EXIT
        ask() { as_server psql -qAtX -h "$SCRATCH/socket" -d postgres -v ON_ERROR_STOP=1 -c "$1"; }
        until ask 'select 1' > /dev/null 2>&1; do
            kill -0 $server || { tail -20 "$SCRATCH/server"; exit 1; }
            sleep 0.1
        done
        ask 'create table rows (number integer primary key, bytes text)'
        n=0
        while [ $n -lt 20 ] || [ ! -e "$STOP" ]; do
            n=$((n + 1))
            ask "insert into rows values ($n, repeat(md5($n::text), 60))"
            [ "$(ask 'select count(*) from rows')" = $n ]
        done
        [ "$(ask "select count(*) from rows where bytes = repeat(md5(number::text), 60)")" = $n ]
        kill -INT $server && wait $server
        trap - EXIT
        as_server "$(readlink -f "$(which postgres)" | xargs dirname)/pg_checksums" -c -D base > "$SCRATCH/check"
        if grep -E 'PANIC|could not' "$SCRATCH/server"; then exit 1; fi
        echo "PostgreSQL: $n commits"
    "#;
    if !is_campaign() {
        return;
    }
    let options = format!("{OPTIONS},allow-other");
    live_through_kills_of("PostgreSQL", &options, script, |_| {});
}

/// Each run tests what the kernel and the mount say of names, owners, modes and times.
///
/// Proves S-crash-11.
#[test]
fn pjdfstest_finds_what_it_finds_without_kills() {
    if !is_campaign() {
        return;
    }
    let sandbox = Sandbox::new("takeoverpjd");
    let mount = FirnMount::new(&sandbox, &format!("{OPTIONS},allow-other"));
    let work = mount.join("work");
    fs::create_dir(&work).expect("mkdir");
    let undisturbed = pjdfstest(&work, sandbox.path());
    let failed: BTreeSet<&String> = undisturbed
        .iter()
        .filter_map(|(name, failed)| failed.then_some(name))
        .collect();
    mount.umount();
    let mut mount = FirnMount::new(&sandbox, &format!("{OPTIONS},allow-other"));
    let seed = seed("takeover under pjdfstest");
    let mut rng = generator(seed);
    let kills = env_count("FIRN_TAKEOVER_KILLS", KILLS_DEFAULT);
    let mut done = 0;
    while done < kills {
        let ends = AtomicBool::new(false);
        let results = std::thread::scope(|scope| {
            let suite = scope.spawn(|| {
                let results = pjdfstest(&work, sandbox.path());
                ends.store(true, Ordering::Relaxed);
                results
            });
            while done < kills && !ends.load(Ordering::Relaxed) {
                mount.note_progress();
                // The random moment is the point of the test, not a wait for a condition.
                std::thread::sleep(Duration::from_millis(rng.random_range(100..700)));
                mount.kill_and_go_on();
                done += 1;
            }
            suite.join().expect("pjdfstest ends")
        });
        let new: Vec<&String> = results
            .iter()
            .filter_map(|(name, has_failed)| {
                (*has_failed && !failed.contains(name)).then_some(name)
            })
            .collect();
        assert!(new.is_empty(), "fail only under kills: {new:?}");
    }
    assert_eq!(mount.status().lost_open_files, 0);
    mount.umount();
    println!("pjdfstest: {} tests, {kills} kills", undisturbed.len());
}
