//! A process with direct access in a few lines, over the library's own client of the data socket; and one that sends
//! what no client sends.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::random::generator;
use firn_direct::arena_map::ArenaMap;
use firn_direct::connection::{Connection, Incoming, Outgoing, Payload, request_token};
use firn_direct::slab_writer::{Appended, SlabWriter};
use firn_format::data_socket::{
    DATA_BYTES_MAX, DATA_SOCKET_VERSION, LEASE_SLABS_MAX, Op, Reply, Request, Slab, Status,
    StubTree, Token,
};
use firn_format::piece::{PIECE_BYTES, Piece, word};
use rand::RngExt;
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

/// What a token would say of the tree whose firnd has this runtime directory, but for the file.
pub fn token_of_tree(runtime: &Path) -> Token {
    let entries = std::fs::read_dir(runtime)
        .expect("list the runtime directory")
        .flatten();
    let path = entries
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "stub"));
    let bytes = std::fs::read(path.expect("a tree")).expect("read what is known of the tree");
    let tree = StubTree::read_from_bytes(&bytes).expect("a whole file");
    Token {
        token: 0,
        version: DATA_SOCKET_VERSION,
        pid: tree.pid,
        arena: tree.arena,
        socket: tree.socket,
    }
}

/// A connection over which nothing was sent yet.
pub fn knock(token: &Token) -> Result<Connection, Errno> {
    Connection::connect_to_any_user(token)
}

/// Sends any bytes and gives the answer's status; `None`: the other side closed.
pub fn say(connection: &Connection, packet: &[u8]) -> Option<Status> {
    connection
        .send_packet(packet.into(), Outgoing::none(), None)
        .ok()?;
    receive_any(connection).map(|reply| Status::from_word(reply.status))
}

/// The head of the next reply, whatever follows it; `None`: the other side closed.
pub fn receive_any(connection: &Connection) -> Option<Reply> {
    let mut reply = Reply::default();
    let mut rest = vec![0; DATA_BYTES_MAX];
    let mut head = Incoming::from(reply.as_mut_bytes());
    let packet = connection.receive_packet(&mut head, &mut Incoming::from(&mut rest[..]));
    (packet.ok()?.len >= size_of::<Reply>()).then_some(reply)
}

/// Sends `count` packets that are requests but for a part of them, over connections that end in between: all
/// operations, tokens of `files` and others, their descriptors and none, lengths that are wrong, offsets at the
/// edges.
pub fn pester(at: &Token, files: &[File], count: usize, rng: &mut impl RngExt) {
    const EDGES: [u64; 10] = [
        0,
        1,
        4095,
        4096,
        1 << 32,
        i64::MAX as u64,
        1 << 63,
        u64::MAX - 7,
        u64::MAX,
        DATA_SOCKET_VERSION as u64,
    ];
    let hello = Request::new(Op::Hello, 0, DATA_SOCKET_VERSION.into());
    let mut tokens: Vec<u64> = files
        .iter()
        .filter_map(|file| Some(request_token(file)?.token))
        .collect();
    let mut socket = None;
    for _ in 0..count {
        let open = socket.take().unwrap_or_else(|| {
            let open = knock(at).expect("the data socket answers");
            if rng.random_bool(0.9) {
                assert_eq!(say(&open, hello.as_bytes()), Some(Status::Ok));
            }
            open
        });
        let known = tokens.get(rng.random_range(0..=tokens.len())).copied();
        let follows = match rng.random_range(0..20) {
            0 => DATA_BYTES_MAX + rng.random_range(0..2),
            1..6 => 16,
            6..12 => 0,
            _ => rng.random_range(0..200),
        };
        let request = Request {
            op: rng.random_range(0..18),
            len: match rng.random_range(0..4) {
                0 => rng.random(),
                1 => 1,
                _ => follows as u32,
            },
            token: known.unwrap_or_else(|| rng.random_range(0..100)),
            arg: if rng.random() {
                EDGES[rng.random_range(0..EDGES.len())]
            } else {
                rng.random_range(0..70_000)
            },
        };
        let words = follows / 8;
        let mut data: Vec<u8> = (0..words)
            .flat_map(|_| EDGES[rng.random_range(0..EDGES.len())].to_ne_bytes())
            .collect();
        data.resize(follows, 7);
        let head = request.as_bytes();
        let head = if rng.random_bool(0.03) {
            &head[..rng.random_range(1..head.len())]
        } else {
            head
        };
        let given = files.get(rng.random_range(0..=files.len()));
        let wanted = if request.op == Op::Adopt as u32 {
            0.9
        } else {
            0.05
        };
        let given = given.filter(|_| rng.random_bool(wanted));
        let fd = given.map(|file| file.as_fd());
        if open.send_packet(head.into(), data[..].into(), fd).is_err() {
            continue;
        }
        let Some(reply) = receive_any(&open) else {
            continue;
        };
        if request.op == Op::Adopt as u32 && Status::from_word(reply.status) == Status::Ok {
            tokens.push(reply.file_id);
        }
        socket = (Status::from_word(reply.status) != Status::Malformed && rng.random_bool(0.98))
            .then_some(open);
    }
}

/// A process's connection, and its mapping of the arena.
pub struct Client {
    connection: Connection,
    map: ArenaMap,
}

/// A file that is written by direct access as long as it is granted.
pub struct DirectFile<'a> {
    client: &'a Client,
    /// The descriptor.
    pub file: File,
    token: u64,
    file_id: u64,
    writer: Option<SlabWriter>,
    /// Leases that follow, in the order in which they are filled.
    more: VecDeque<Slab>,
    /// Whether direct access is granted.
    pub granted: bool,
}

impl Client {
    /// Connects with the token of any open file of the mount.
    pub fn new(token: &Token) -> Self {
        let own_user = rustix::process::geteuid().as_raw();
        let connection = Connection::connect(token, own_user).expect("the data socket");
        connection.send_hello(None).expect("send hello");
        let (arena, fd) = connection.receive_hello(&token.arena).expect("the arena");
        let map = ArenaMap::map(&fd, &arena).expect("map the arena");
        Self { connection, map }
    }

    fn ask(&self, op: Op, token: u64, arg: u64) -> Option<Reply> {
        let request = Request::new(op, token, arg);
        self.connection.call(&request, &mut Payload::none()).ok()
    }

    /// A word of what the client may write, `at` bytes from the start of the arena.
    fn word(&self, at: u64) -> &AtomicU64 {
        // SAFETY: callers name aligned words of a lease, which firnd put into the mapping; it is never unmapped.
        unsafe { AtomicU64::from_ptr(self.map.base().wrapping_add(at as usize).cast()) }
    }

    /// Asks for direct access to an open file.
    pub fn open(&self, file: File) -> DirectFile<'_> {
        let token = request_token(&file).expect("a file of the mount").token;
        let mut open = DirectFile {
            client: self,
            file,
            token,
            file_id: 0,
            writer: None,
            more: VecDeque::new(),
            granted: false,
        };
        open.ask();
        open
    }
}

impl DirectFile<'_> {
    /// Asks for direct access; what firnd says.
    pub fn ask(&mut self) -> Option<Status> {
        let reply = self.client.ask(Op::OpenWrite, self.token, 0)?;
        let status = Status::from_word(reply.status);
        (self.file_id, self.writer, self.granted) = (reply.file_id, None, status == Status::Ok);
        self.more.clear();
        Some(status)
    }

    /// Writes by direct access; how many bytes were taken.
    pub fn append(&mut self, offset: u64, data: &[u8]) -> usize {
        let mut done = 0;
        while self.granted && done < data.len() {
            let outcome = match &mut self.writer {
                // SAFETY: the bytes are a slice's.
                Some(writer) => unsafe {
                    writer.append(
                        offset + done as u64,
                        data[done..].as_ptr(),
                        data.len() - done,
                    )
                },
                None => Appended::Full,
            };
            match outcome {
                Appended::Bytes(n) => done += n,
                Appended::Full => self.granted = self.lease((data.len() - done) as u64),
                Appended::Revoked => self.granted = false,
            }
        }
        done
    }

    /// The same, and asks again where the grant was revoked meanwhile: any process that is started here
    /// closes its copies of all descriptors, and a close ends the grant.
    pub fn append_again(&mut self, offset: u64, data: &[u8]) {
        let mut done = self.append(offset, data);
        while done < data.len() {
            assert_eq!(self.ask(), Some(Status::Ok), "after {done} bytes");
            done += self.append(offset + done as u64, &data[done..]);
        }
    }

    /// Garbage over the records of the lease and the bytes of its slab, as of a program that has lost its way.
    fn scribble(&mut self, rng: &mut impl RngExt) {
        let slab = *self.writer.as_ref().expect("a lease").slab();
        let words = |from: u64, bytes: u64| (from..from + bytes / 8 * 8).step_by(8);
        let records = words(slab.records, u64::from(slab.record_count) * PIECE_BYTES);
        let data = words(
            slab.chunk + u64::from(slab.start),
            u64::from(slab.end - slab.start),
        );
        let share = [0.001, 0.1, 1.0][rng.random_range(0..3)];
        for at in records.chain(data).chain([slab.writer]) {
            if rng.random_bool(share) {
                let word = self.client.word(at);
                let bits = if rng.random() {
                    rng.random()
                } else {
                    1 << rng.random_range(0..64)
                };
                word.fetch_xor(bits, Ordering::AcqRel);
            }
        }
    }

    /// Records of the lease that are whole and say that another file was written, from its start on.
    fn forge(&mut self, file_id: u64) {
        let slab = *self.writer.as_ref().expect("a lease").slab();
        for index in 0..u64::from(slab.record_count) {
            let sequence = slab.sequence + index;
            let piece = Piece {
                file: file_id,
                offset: 0,
                sequence,
                position: slab.start,
                len: 64,
            };
            let record = slab.records + index * PIECE_BYTES;
            let store = |at: u64, value: u64| {
                let word = self.client.word(record + at);
                word.store(value, Ordering::Release);
            };
            store(word::FILE, piece.file_word());
            store(word::OFFSET, piece.offset);
            store(word::POSITION, piece.position_word());
            store(word::SEAL, piece.seal(slab.generation));
        }
    }

    fn lease(&mut self, want: u64) -> bool {
        let lease = match self.more.pop_front() {
            Some(lease) => Some(lease),
            None => self.request_leases(want),
        };
        // SAFETY: firnd gives a lease once, in one reply.
        let writer = |lease| unsafe { self.client.map.slab_writer(lease, self.file_id) };
        self.writer = lease.map(|lease| writer(lease).expect("a lease in the mapping"));
        self.writer.is_some()
    }

    /// Asks for leases: the first one, where there is one, and keeps the others.
    fn request_leases(&mut self, want: u64) -> Option<Slab> {
        let request = Request::new(Op::Lease, self.token, want);
        let mut more = [Slab::default(); LEASE_SLABS_MAX - 1];
        let mut payload = Payload {
            room: Incoming::from(&mut more[..]),
            ..Payload::none()
        };
        let reply = self.client.connection.call(&request, &mut payload).ok()?;
        self.more.extend(&more[..reply.count as usize]);
        (Status::from_word(reply.status) == Status::Ok).then_some(reply.lease)
    }

    /// Writes by direct access, and the rest through the kernel.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let done = self.append(offset, data);
        self.file.write_all_at(&data[done..], offset + done as u64)
    }
}

/// The bytes that [`write_until_killed`] writes at `offset`.
pub fn byte_at(offset: u64) -> u8 {
    (offset % 253) as u8 ^ (offset >> 12) as u8
}

/// Appends to a file by direct access until killed, and tells in `log` after each write how much was
/// acknowledged.
pub fn write_until_killed(path: &Path, log: &Path) {
    let file = File::create(path).expect("create");
    let client = Client::new(&request_token(&file).expect("a token"));
    let mut direct = client.open(file);
    let mut log = File::create(log).expect("create the log");
    let mut at = 0u64;
    loop {
        let len = 1 + at * 7919 % 50_000;
        let data: Vec<u8> = (at..at + len).map(byte_at).collect();
        if !direct.granted {
            direct.ask();
        }
        let done = direct.append(at, &data);
        if done < data.len()
            && direct
                .file
                .write_all_at(&data[done..], at + done as u64)
                .is_err()
        {
            // firnd is gone: what it took by direct access still counts.
            at += done as u64;
            say_acknowledged(&mut log, at);
            return;
        }
        at += len;
        say_acknowledged(&mut log, at);
    }
}

fn say_acknowledged(log: &mut File, at: u64) {
    log.seek(SeekFrom::Start(0))
        .and_then(|_| log.write_all(&at.to_ne_bytes()))
        .expect("tell");
}

/// Appends by direct access, spoils its records and slab, says so, and goes on for each line that it reads.
/// `how` is `garbage`, or `forged`: records of the files that were bound before and after its own.
/// A process of its own, because those of another that starts programs close their copies of its descriptors,
/// which ends leases.
pub fn spoil_on_command(path: &Path, how: &str, seed: u64) {
    let mut rng = generator(seed);
    let file = File::create(path).expect("create");
    let client = Client::new(&request_token(&file).expect("a token"));
    let mut direct = client.open(file);
    let mut at = 0;
    let mut append = |direct: &mut DirectFile<'_>, len: u64| {
        let done = direct.append(at, &(at..at + len).map(byte_at).collect::<Vec<u8>>());
        at += done as u64;
        println!("{done}");
    };
    append(&mut direct, 10);
    direct.file.metadata().expect("fstat");
    append(&mut direct, 100_000);
    match how {
        "garbage" => direct.scribble(&mut rng),
        _ => {
            let file_id = direct.file_id;
            direct.forge(if rng.random() {
                file_id - 1
            } else {
                file_id + 1
            });
        }
    }
    println!("spoiled");
    for line in std::io::stdin().lines() {
        line.expect("a line");
        append(&mut direct, 3_000);
    }
}

/// What [`write_until_killed`] told last.
pub fn acknowledged(log: &Path) -> u64 {
    let mut word = [0; 8];
    match File::open(log).and_then(|mut log| log.read_exact(&mut word)) {
        Ok(()) => u64::from_ne_bytes(word),
        Err(_) => 0,
    }
}

/// Prints the version of the data socket that `path` has for this process.
pub fn print_version(path: &Path) {
    let token = File::open(path).ok().and_then(|file| request_token(&file));
    println!(
        "{}",
        token.map_or("none".into(), |token| token.version.to_string())
    );
}

/// The first request of a connection and another one in one packet.
pub fn hello_and(next: &Request) -> Vec<u8> {
    let hello = Request::new(Op::Hello, 0, DATA_SOCKET_VERSION.into());
    [hello.as_bytes(), next.as_bytes()].concat()
}
