//! The messages between a keeper and its firnd: packets of 16 bytes, some of them with a descriptor. firnd serves a
//! mount; the keeper starts the next firnd when one dies.
//!
//! Packet: byte 0 is the kind, byte 1 the tag or the result of an upgrade, bytes 8 to 15 a number. A packet of an
//! unknown kind is ignored, so versions can differ.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Stdio;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// The purpose of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Tag {
    /// The request of `firn mount`, a file of JSON.
    Request = 1,
    /// The connection to the kernel (/dev/fuse).
    Device = 2,
    /// The file by which the connection can be aborted.
    Control = 3,
    /// A pidfd of the process that asked for the mount and ends it.
    Caller = 4,
    /// A pidfd of firnd itself.
    Firnd = 5,
    /// A mark that another firnd can continue the mount. The descriptor itself is unused.
    CanBeTakenOver = 6,
    /// The log: standard error of the next firnd, until that firnd has opened the log itself.
    Log = 7,
    /// An open file without a name. The label's number is that of the kernel's node.
    NamelessFile = 8,
    /// The program of the firnd that served last; if it is missing, the keeper's own program is used.
    Program = 9,
    /// The program of an upgrade, until it serves.
    NextProgram = 10,
    /// The request of an upgrade, until the upgrade serves.
    NextRequest = 11,
    /// A file to which the firnd of an upgrade writes why it does not serve.
    UpgradeReport = 12,
    /// A lock file in the backing. The label's number is its inode number.
    LockFile = 13,
    /// The locked backing directory.
    BackingLock = 14,
    /// The locked arena.
    ArenaLock = 15,
    /// The locked lease file of this host in the backing.
    Lease = 16,
}

impl Tag {
    /// Returns the tag (the purpose of a descriptor) that a packet or a name has as `number`; `None` if a later version
    /// of Firn has sent an unknown tag.
    pub(super) fn from_number(number: u8) -> Option<Self> {
        [
            Self::Request,
            Self::Device,
            Self::Control,
            Self::Caller,
            Self::Firnd,
            Self::CanBeTakenOver,
            Self::Log,
            Self::NamelessFile,
            Self::Program,
            Self::NextProgram,
            Self::NextRequest,
            Self::UpgradeReport,
            Self::LockFile,
            Self::BackingLock,
            Self::ArenaLock,
            Self::Lease,
        ]
        .into_iter()
        .find(|tag| *tag as u8 == number)
    }
}

/// Identifies a kept descriptor; each label is used for one descriptor at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    pub(crate) tag: Tag,
    /// Distinguishes descriptors with the same tag; 0 if there is only one.
    pub(crate) number: u64,
}

impl From<Tag> for Label {
    fn from(tag: Tag) -> Self {
        Self { tag, number: 0 }
    }
}

/// A descriptor that the keeper holds for the next firnd.
#[derive(Debug)]
pub(crate) struct KeptDescriptor {
    pub(crate) label: Label,
    pub(crate) descriptor: OwnedFd,
}

/// A message.
#[derive(Debug)]
pub(crate) enum Message {
    /// To the keeper: hold this descriptor for the next firnd. To a firnd: this descriptor was held.
    Keep(KeptDescriptor),
    /// To the keeper: drop the descriptor with this label.
    Drop(Label),
    /// To the keeper: programs see the mount.
    Serving,
    /// To the keeper: the mount ends with this firnd.
    Ending,
    /// To the keeper: ping this firnd, and kill it if no answer comes within this time.
    Watch(Duration),
    /// To a firnd: answer with [`Message::Pong`].
    Ping,
    /// To the keeper: this firnd answers.
    Pong,
    /// To a firnd: all descriptors were sent. `death_time` is when the end of the earlier firnd was seen, as time since
    /// the boot; `None` for the first firnd.
    Begin {
        death_time: Option<Duration>,
        last_upgrade: UpgradeResult,
    },
}

/// The result of the last upgrade of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum UpgradeResult {
    /// There was no upgrade.
    #[default]
    None = 0,
    /// The upgrade succeeded, or the firnd that begins now is the one to serve it.
    Done = 1,
    /// The new program did not begin to serve; [`Tag::UpgradeReport`] says why.
    Refused = 2,
}

impl UpgradeResult {
    fn from_number(number: u8) -> Self {
        [Self::Done, Self::Refused]
            .into_iter()
            .find(|result| *result as u8 == number)
            .unwrap_or_default()
    }
}

// The kinds of packets, in byte 0. `BEGIN` goes to the first firnd of a mount, and `BEGIN_AGAIN` to each later one.
const KEEP: u8 = 1;
const SERVING: u8 = 2;
const ENDING: u8 = 3;
const BEGIN: u8 = 4;
const BEGIN_AGAIN: u8 = 5;
const DROP: u8 = 6;
const WATCH: u8 = 7;
const PING: u8 = 8;
const PONG: u8 = 9;
const PACKET_BYTES: usize = 16;

/// One end of the connection between a keeper and its firnd.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (first_end, second_end) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self(first_end), Self(second_end)))
    }

    pub(crate) fn into_stdio(self) -> Stdio {
        self.0.into()
    }

    /// Limits how long a message waits for space in the socket.
    pub(crate) fn limit_waits(&self, timeout: Duration) -> io::Result<()> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        Ok(set_socket_timeout(&self.0, Timeout::Send, Some(timeout))?)
    }

    /// Sends a descriptor for the other side to hold.
    pub(crate) fn send_descriptor(&self, label: Label, descriptor: impl AsFd) -> io::Result<()> {
        let packet = self::packet(KEEP, label.tag as u8, label.number);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        rights.push(SendAncillaryMessage::ScmRights(&descriptors));
        let parts = [IoSlice::new(&packet)];
        rustix::io::retry_on_intr(|| sendmsg(&self.0, &parts, &mut rights, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Tells the other side to drop a descriptor.
    pub(crate) fn send_drop(&self, label: Label) -> io::Result<()> {
        self.send_packet(packet(DROP, label.tag as u8, label.number))
    }

    fn send_packet(&self, packet: [u8; PACKET_BYTES]) -> io::Result<()> {
        rustix::io::retry_on_intr(|| rustix::net::send(&self.0, &packet, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    pub(crate) fn notify_serving(&self) -> io::Result<()> {
        self.send_packet(packet(SERVING, 0, 0))
    }

    pub(crate) fn notify_ending(&self) -> io::Result<()> {
        self.send_packet(packet(ENDING, 0, 0))
    }

    pub(crate) fn send_watch_limit(&self, limit: Duration) -> io::Result<()> {
        self.send_packet(packet(WATCH, 0, nanoseconds(limit)))
    }

    pub(crate) fn send_pong(&self) -> io::Result<()> {
        self.send_packet(packet(PONG, 0, 0))
    }

    /// Pings firnd without waiting. If the socket is full, firnd has enough unanswered pings, so this one is dropped.
    pub(crate) fn send_ping(&self) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&self.0, &packet(PING, 0, 0), flags);
    }

    /// Sends [`Message::Begin`]. The first firnd of a mount has no `death_time`.
    pub(crate) fn send_begin(
        &self,
        death_time: Option<Duration>,
        last_upgrade: UpgradeResult,
    ) -> io::Result<()> {
        self.send_packet(match death_time {
            None => packet(BEGIN, 0, 0),
            Some(time) => packet(BEGIN_AGAIN, last_upgrade as u8, nanoseconds(time)),
        })
    }

    /// Returns whether [`Socket::receive`] would return at once.
    pub(crate) fn has_message(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(
            &self.0,
            rustix::event::PollFlags::IN,
        )];
        let no_wait = rustix::event::Timespec::default();
        rustix::event::poll(&mut fds, Some(&no_wait)).is_ok_and(|ready| ready > 0)
    }

    /// Receives the next message of the keeper or firnd at the other side; `None` if that process has ended. Waits for
    /// it. Packets of an unknown kind are skipped.
    pub(crate) fn receive(&self) -> io::Result<Option<Message>> {
        loop {
            let mut packet = [0; PACKET_BYTES];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut rights = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::io::retry_on_intr(|| {
                recvmsg(
                    &self.0,
                    &mut [IoSliceMut::new(&mut packet)],
                    &mut rights,
                    RecvFlags::CMSG_CLOEXEC,
                )
            });
            match received {
                Ok(received) if received.bytes == 0 => return Ok(None),
                Ok(_) => {}
                Err(rustix::io::Errno::CONNRESET) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
            let descriptor = rights.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
                _ => None,
            });
            // An unknown packet of a later version is ignored.
            if let Some(message) = decode(packet, descriptor) {
                return Ok(Some(message));
            }
        }
    }
}

/// Returns the time since the boot of the host.
pub(crate) fn uptime() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn packet(kind: u8, tag: u8, number: u64) -> [u8; PACKET_BYTES] {
    let mut packet = [0; PACKET_BYTES];
    packet[0] = kind;
    packet[1] = tag;
    packet[8..].copy_from_slice(&number.to_ne_bytes());
    packet
}

/// Decodes a packet between a keeper and firnd, with the descriptor that came with it; `None` if its kind or tag is
/// unknown, or its descriptor is missing.
fn decode(packet: [u8; PACKET_BYTES], descriptor: Option<OwnedFd>) -> Option<Message> {
    let [kind, tag, _, _, _, _, _, _, number_bytes @ ..] = packet;
    let number = u64::from_ne_bytes(number_bytes);
    let label = || {
        let tag = Tag::from_number(tag)?;
        Some(Label { tag, number })
    };
    Some(match kind {
        KEEP => Message::Keep(KeptDescriptor {
            label: label()?,
            descriptor: descriptor?,
        }),
        DROP => Message::Drop(label()?),
        SERVING => Message::Serving,
        ENDING => Message::Ending,
        WATCH => Message::Watch(Duration::from_nanos(number)),
        PING => Message::Ping,
        PONG => Message::Pong,
        BEGIN => Message::Begin {
            death_time: None,
            last_upgrade: UpgradeResult::None,
        },
        BEGIN_AGAIN => Message::Begin {
            death_time: Some(Duration::from_nanos(number)),
            last_upgrade: UpgradeResult::from_number(tag),
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_and_words_arrive_in_order_and_the_end_is_seen() {
        let (one, other) = Socket::pair().unwrap();
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        one.send_descriptor(Tag::Device.into(), &file).unwrap();
        let nameless = Label {
            tag: Tag::NamelessFile,
            number: u64::MAX,
        };
        one.send_descriptor(nameless, &file).unwrap();
        one.send_drop(nameless).unwrap();
        one.notify_serving().unwrap();
        one.send_begin(Some(Duration::from_micros(7)), UpgradeResult::Refused)
            .unwrap();
        drop(one);
        let receive = || other.receive().unwrap();
        for label in [Tag::Device.into(), nameless] {
            let Some(Message::Keep(kept)) = receive() else {
                panic!("no descriptor");
            };
            assert_eq!(kept.label, label);
        }
        assert!(matches!(receive(), Some(Message::Drop(label)) if label == nameless));
        assert!(matches!(receive(), Some(Message::Serving)));
        let Some(Message::Begin {
            death_time,
            last_upgrade,
        }) = receive()
        else {
            panic!("no beginning");
        };
        assert_eq!(last_upgrade, UpgradeResult::Refused);
        assert_eq!(death_time, Some(Duration::from_micros(7)));
        assert!(receive().is_none());
    }

    #[test]
    fn a_packet_without_its_descriptor_means_nothing() {
        assert!(decode(packet(KEEP, Tag::Device as u8, 0), None).is_none());
        assert!(decode(packet(99, 0, 0), None).is_none());
    }
}
