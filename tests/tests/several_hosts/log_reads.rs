//! Files in logs, and files that were, that programs under the preload library read by descriptors of the backing's own
//! files, without firnd.
//!
//! Needs root and FUSE.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use firn_tests::lanes::place_in;
use firn_tests::preloaded::{Frontend, python};
use firn_tests::{FirnMount, Outcome, Sandbox, run, wait_until};

/// Too long for firnd to be asked whether a list still holds.
const LONG: &str = "attr-timeout=1h";
/// A process with the file open sees what others have closed after this time.
const SHORT: &str = "attr-timeout=300ms";
/// Longer than any of that takes.
const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of one record: neighbours are another host's.
const RECORD: usize = 4097;
/// Records of a file: more than one answer of firnd has extents.
const RECORDS: u64 = 3000;

/// Two hosts over one directory, and maybe lanes.
struct Hosts {
    shared: Sandbox,
    hosts: [Sandbox; 2],
    lanes: Vec<PathBuf>,
}

impl Hosts {
    fn new(name: &str) -> Self {
        let host = |at: usize| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}"));
        Self {
            shared: Sandbox::new(name),
            hosts: [host(0), host(1)],
            lanes: Vec::new(),
        }
    }

    fn over_lanes(name: &str) -> Self {
        let mut cluster = Self::new(&format!("{name}-lanes"));
        cluster.lanes = ["lane0", "lane1"]
            .map(|lane| cluster.shared.mkdir(lane))
            .into();
        cluster
    }

    fn mount(&self, at: usize, more: &str) -> FirnMount<'_> {
        let options =
            format!("arena-size=64M,chunk-size=4M,layout=log,flatten=demand,close=drain,{more}");
        let options = if self.lanes.is_empty() {
            options
        } else {
            place_in(&self.lanes, &options)
        };
        FirnMount::over(&self.hosts[at], &self.shared.join("backing"), &options)
    }

    fn run(&self, at: usize, mut command: Command) -> Outcome {
        run(Frontend::Mount.preload(&self.hosts[at], &mut command))
    }
}

fn record(number: u64, version: u8) -> Vec<u8> {
    let byte = |n: u64| (number * 7 + n) as u8 ^ version;
    (0..RECORD as u64).map(byte).collect()
}

fn all_records() -> Vec<u8> {
    (0..RECORDS).flat_map(|number| record(number, 0)).collect()
}

fn create(mount: &FirnMount<'_>, name: &str) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.open(mount.join(name)).expect("open")
}

fn write_record(mount: &FirnMount<'_>, number: u64, version: u8) {
    let file = create(mount, "file");
    let offset = number * RECORD as u64;
    file.write_all_at(&record(number, version), offset)
        .expect("write");
}

/// Both hosts write the file, record by record in turns.
fn write_file(mounts: &[FirnMount<'_>; 2]) {
    let files = [create(&mounts[0], "file"), create(&mounts[1], "file")];
    for number in 0..RECORDS {
        let file = &files[(number % 2) as usize];
        let offset = number * RECORD as u64;
        file.write_all_at(&record(number, 0), offset)
            .expect("write");
    }
}

/// Bytes that the programs of a report had from files of the backing.
fn backing_bytes(outcome: &Outcome) -> u64 {
    let lines = outcome.stderr.lines();
    let counts = lines.filter_map(|line| {
        let (_, text) = line.split_once("]: ")?;
        let count = text.strip_suffix(" bytes were read from files of the backing")?;
        count.parse::<u64>().ok()
    });
    counts.sum()
}

/// Reads a file in several ways, and compares it with another.
const READ: &str = "
import os, sys
path, same = sys.argv[1] + '/file', open(sys.argv[2], 'rb').read()
fd = os.open(path, os.O_RDONLY)
for size in (1000, 100_000, 1 << 24):
    os.lseek(fd, 0, os.SEEK_SET)
    parts = []
    while part := os.read(fd, size):
        parts.append(part)
    assert b''.join(parts) == same, 'read %d' % size
for at in list(range(len(same) - 10, 0, -777_777)) + [0, 5, len(same)]:
    assert os.pread(fd, 9000, at) == same[at:at + 9000], 'pread at %d' % at
one, other = bytearray(70_000), bytearray(3)
assert os.preadv(fd, [one, other], 12_345) == 70_003
assert one + other == same[12_345:12_345 + 70_003]
assert os.pread(fd, 10, len(same)) == b''
";

/// Proves S-direct-8: a file in logs of several hosts, and the same file when it is plain again, is read by descriptors of the
/// backing's files.
#[test]
fn files_in_logs_and_flat_ones_are_read_from_the_backing() {
    for cluster in [Hosts::new("reads"), Hosts::over_lanes("reads")] {
        let data = cluster.shared.join("data");
        let expected = all_records();
        fs::write(&data, &expected).expect("write");
        let mounts = [cluster.mount(0, LONG), cluster.mount(1, LONG)];
        write_file(&mounts);
        for is_flat in [false, true] {
            if is_flat {
                mounts[0].wait("drained", mounts[0].path()).ok();
            }
            let plain = cluster.shared.join("backing").join("file");
            let plain_bytes = fs::metadata(&plain).expect("stat").len();
            assert_eq!(plain_bytes == expected.len() as u64, is_flat);
            for (host, mount) in mounts.iter().enumerate() {
                let mut read = python(READ, mount.path());
                read.arg(&data);
                let said = cluster.run(host, read).ok();
                let bytes = backing_bytes(&said);
                assert!(bytes >= 3 * expected.len() as u64, "{said}");
            }
        }
    }
}

/// Pieces of a file of which no list has all.
const PIECES: u64 = 80_000;
const PIECE_BYTES: u64 = 16;

/// Writes every second piece of 16 bytes, from a number on.
const WRITE_PIECES: &str = "
import os, sys
path, same, first = sys.argv[1] + '/file', open(sys.argv[2], 'rb').read(), int(sys.argv[3])
fd = os.open(path, os.O_WRONLY | os.O_CREAT)
for at in range(first * 16, len(same), 32):
    assert os.pwrite(fd, same[at:at + 16], at) == 16
os.close(fd)
";

/// Reads forward in small and large steps, backward, and here and there.
const READ_PIECES: &str = "
import os, random, sys
path, same = sys.argv[1] + '/file', open(sys.argv[2], 'rb').read()
def check(size, at):
    assert os.pread(fd, size, at) == same[at:at + size], (size, at)
for step in (4096, 50_000, -30_000, 0):
    fd = os.open(path, os.O_RDONLY)
    if step:
        for at in range(0, len(same), abs(step)):
            check(abs(step), at if step > 0 else len(same) - at)
    else:
        random.seed(1)
        for _ in range(300):
            check(random.choice((10, 1000, 20_000)), random.randrange(len(same)))
    os.close(fd)
";

/// Proves S-direct-8: of a file of very many pieces programs are told a part at a time.
#[test]
fn files_of_very_many_pieces_are_read_part_by_part() {
    let cluster = Hosts::new("pieces");
    let data = cluster.shared.join("data");
    let byte = |n: u64| (n * 7 + n / 251) as u8;
    let expected: Vec<u8> = (0..PIECES * PIECE_BYTES).map(byte).collect();
    fs::write(&data, &expected).expect("write");
    let mounts = [cluster.mount(0, LONG), cluster.mount(1, LONG)];
    for (host, mount) in mounts.iter().enumerate() {
        let mut write = python(WRITE_PIECES, mount.path());
        write.arg(&data).arg(host.to_string());
        cluster.run(host, write).ok();
    }
    let mut read = python(READ_PIECES, mounts[0].path());
    read.arg(&data);
    let said = cluster.run(0, read).ok();
    let bytes = backing_bytes(&said);
    assert!(bytes >= 2 * expected.len() as u64, "{said}");
}

/// A program that has the file open, and does what it is told.
struct Reader {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

const OBEY: &str = "
import ctypes, os, sys
fd = os.open(sys.argv[1] + '/file', os.O_RDONLY)
libc = ctypes.CDLL(None)

def own_numbers():
    found = {}
    for name in os.listdir('/proc/self/fd'):
        try:
            found[int(name)] = os.readlink('/proc/self/fd/' + name)
        except OSError:
            pass
    return [number for number, path in found.items()
            if number != fd and not path.startswith(('/dev', '/proc', 'pipe:', 'socket:', 'anon', '/memfd'))
            and ('/backing/' in path or '/lane' in path)]

for line in sys.stdin:
    words = line.split()
    if words[0] == 'read':
        answer = os.pread(fd, int(words[2]), int(words[1])).hex()
    else:
        answer = str(eval(line))
    print(answer, flush=True)
";

impl Reader {
    fn start(cluster: &Hosts, mount: &FirnMount<'_>) -> Self {
        let mut command = python(OBEY, mount.path());
        Frontend::Mount
            .preload(&cluster.hosts[0], &mut command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = command.spawn().expect("python");
        let input = process.stdin.take().expect("stdin");
        let output = BufReader::new(process.stdout.take().expect("stdout"));
        Self {
            process,
            input,
            output,
        }
    }

    /// Has it do something, and gives what it says.
    #[track_caller]
    fn obey(&mut self, order: &str) -> String {
        writeln!(self.input, "{order}").expect("an order");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("an answer");
        answer.trim_end().to_owned()
    }

    /// The version of a record that it reads.
    #[track_caller]
    fn version_of(&mut self, number: u64) -> u8 {
        let order = format!("read {} {RECORD}", number * RECORD as u64);
        let found = self.obey(&order);
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let is_it = |version: &u8| hex(&record(number, *version)) == found;
        (0..=u8::MAX)
            .find(is_it)
            .expect("a record that somebody wrote")
    }

    /// Numbers of the library's own descriptors of files of the backing.
    fn own_numbers(&mut self) -> Vec<i32> {
        let said = self.obey("own_numbers()");
        let numbers = said.trim_matches(['[', ']']).split(", ");
        numbers
            .filter(|number| !number.is_empty())
            .map(|number| number.parse().expect("a number"))
            .collect()
    }

    /// Ends it; what it reports.
    fn end(self) -> String {
        drop(self.input);
        let output = self.process.wait_with_output().expect("the end");
        assert!(output.status.success());
        String::from_utf8(output.stderr).expect("a report")
    }
}

fn assert_reads_backing(report: &str) {
    assert!(
        report.contains("read from files of the backing"),
        "{report}"
    );
}

/// Proves S-log-4, S-direct-8: a process that reads a file by descriptors of the backing's files sees what others have
/// closed when a process on the host opens or syncs the file, and after `attr-timeout`; what its own host writes at
/// once.
#[test]
fn readers_of_the_backing_see_changes_when_they_must() {
    for flattens in [false, true] {
        let cluster = Hosts::new("seen");
        let mounts = [cluster.mount(0, LONG), cluster.mount(1, LONG)];
        write_file(&mounts);
        if flattens {
            mounts[0].wait("drained", mounts[0].path()).ok();
        }
        let mut reader = Reader::start(&cluster, &mounts[0]);
        assert_eq!(reader.version_of(7), 0);
        assert_ne!(reader.own_numbers(), [] as [i32; 0]);
        write_record(&mounts[1], 7, 1);
        assert_eq!(reader.version_of(7), 0, "an hour is not over");
        drop(File::open(mounts[0].join("file")).expect("open"));
        assert_eq!(reader.version_of(7), 1, "opened");
        write_record(&mounts[1], 7, 2);
        reader.obey("os.fsync(fd)");
        assert_eq!(reader.version_of(7), 2, "synced");
        write_record(&mounts[0], 7, 3);
        assert_eq!(reader.version_of(7), 3, "written here");
        // The length, too.
        for (host, bytes) in [(0, 100_u64), (0, 20_000_000)] {
            create(&mounts[host], "file").set_len(bytes).expect("cut");
            let order = format!("len(os.pread(fd, 30_000_000, 50)) == {}", bytes - 50);
            assert_eq!(reader.obey(&order), "True");
        }
        assert_reads_backing(&reader.end());
    }
}

/// Proves S-log-4.
#[test]
fn readers_of_the_backing_see_what_others_closed_after_a_while() {
    let cluster = Hosts::new("while");
    let mounts = [cluster.mount(0, SHORT), cluster.mount(1, SHORT)];
    write_file(&mounts);
    let mut reader = Reader::start(&cluster, &mounts[0]);
    for version in 1..4 {
        write_record(&mounts[1], 7, version);
        wait_until("it is seen", LIMIT, || reader.version_of(7) == version);
        // That read found the list to be of before, and the next one asks for another.
        assert_eq!(reader.version_of(7), version);
        assert_ne!(reader.own_numbers(), [] as [i32; 0]);
    }
    // It was cut by another host, and made longer.
    for bytes in [50_000, 70_000] {
        create(&mounts[1], "file").set_len(bytes).expect("cut");
        let order = format!("len(os.pread(fd, 100_000, 0)) == {bytes}");
        wait_until("it is cut", LIMIT, || reader.obey(&order) == "True");
    }
    assert_reads_backing(&reader.end());
}

/// Proves S-direct-3, S-direct-8: bytes in the arena lie over those in the backing, until they are drained.
#[test]
fn readers_of_the_backing_see_what_the_arena_has() {
    let cluster = Hosts::new("arena");
    let mounts = [
        cluster.mount(0, "attr-timeout=1h,close=held,drain-age=10min"),
        cluster.mount(1, LONG),
    ];
    let file = create(&mounts[1], "file");
    for number in 0..RECORDS {
        let offset = number * RECORD as u64;
        file.write_all_at(&record(number, 0), offset)
            .expect("write");
    }
    drop(file);
    let mut reader = Reader::start(&cluster, &mounts[0]);
    for version in [1, 2] {
        for number in [5, 7, 9] {
            write_record(&mounts[0], number, version);
        }
        let versions =
            |reader: &mut Reader| [4, 5, 6, 7, 8, 9, 10].map(|number| reader.version_of(number));
        let expected = [0, version, 0, version, 0, version, 0];
        assert_eq!(versions(&mut reader), expected);
        assert_eq!(versions(&mut reader), expected);
        mounts[0].wait("logged", mounts[0].path()).ok();
        assert_eq!(versions(&mut reader), expected, "drained");
        assert_eq!(versions(&mut reader), expected, "drained");
    }
    mounts[0].wait("drained", mounts[0].path()).ok();
    assert_eq!(reader.version_of(7), 2, "flat");
    // More than one answer of firnd has.
    let whole = format!(
        "len(os.pread(fd, 100_000_000, 0)) == {}",
        RECORDS * RECORD as u64
    );
    assert_eq!(reader.obey(&whole), "True");
    assert_reads_backing(&reader.end());
}

/// The library's own descriptors are out of the program's way, and never taken for another file.
#[test]
fn descriptors_of_the_backing_are_left_alone_by_programs() {
    let cluster = Hosts::new("numbers");
    let mounts = [cluster.mount(0, LONG), cluster.mount(1, LONG)];
    write_file(&mounts);
    let mut reader = Reader::start(&cluster, &mounts[0]);
    let mut number = || {
        assert_eq!(reader.version_of(8), 0);
        assert_eq!(reader.version_of(9), 0);
        let own = reader.own_numbers();
        assert!(own.iter().all(|number| *number >= 900), "{own:?}");
        own[0]
    };
    let first = number();
    let refused = format!("libc.close({first})");
    assert_eq!(reader.obey(&refused), "-1");
    assert_eq!(reader.obey("libc.close_range(fd + 1, 100000, 0)"), "0");
    assert!(reader.own_numbers().contains(&first));
    reader.obey("libc.closefrom(900)");
    assert!(reader.own_numbers().contains(&first));
    // The program wants this number, and gets it.
    reader.obey(&format!("os.dup2(os.open('/etc/passwd', 0), {first})"));
    assert_eq!(reader.version_of(8), 0);
    assert_eq!(reader.version_of(9), 0);
    let passwd = format!("os.readlink('/proc/self/fd/{first}')");
    assert_eq!(reader.obey(&passwd), "/etc/passwd");
    // A raw system call takes one away, which is another file then.
    let own = reader.own_numbers();
    for number in &own {
        reader.obey(&format!("libc.syscall(33, {first}, {number})"));
    }
    assert_eq!(reader.version_of(8), 0);
    assert_eq!(reader.version_of(9), 0);
    reader.obey(&format!("os.close({first})"));
    // A child has none of them.
    assert_ne!(reader.own_numbers(), [] as [i32; 0]);
    let child =
        "(lambda pid: os.waitpid(pid, 0)[1] if pid else os._exit(len(own_numbers())))(os.fork())";
    assert_eq!(reader.obey(child), "0");
    assert_eq!(reader.version_of(8), 0);
    assert_eq!(reader.obey("os.close(fd)"), "None");
    assert_eq!(reader.own_numbers(), [] as [i32; 0]);
    assert_reads_backing(&reader.end());
}
