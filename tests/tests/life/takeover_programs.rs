//! Programs that know nothing of Firn, while firnd is killed again and again: they see no error, and what they check holds.
//!
//! `FIRN_TAKEOVER_KILLS` sets the kills under each program (`cargo xtask campaign takeover`), `FIRN_SEED` the seed.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_tests::random::{env_count, generator};
use firn_tests::suite::tool;
use firn_tests::{FirnMount, Sandbox, run, seed};
use rand::RngExt;

const KILLS_DEFAULT: u64 = 4;
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,takeover=auto";

/// Runs `script` in the mount until it has lived through all kills; `$STOP` is there from then on, and it is to end. Gives
/// the backing, after the unmount, to `check`.
fn live_through_kills(name: &str, script: &str, check: impl FnOnce(&Path)) {
    let seed = seed(&format!("takeover under {name}"));
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("programs");
    let mut mount = FirnMount::new(&sandbox, OPTIONS);
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
