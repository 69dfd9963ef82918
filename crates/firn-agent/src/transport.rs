//! The byte stream between an *agent*, which serves the files of a mount, and a *puller*, which copies these files to
//! another host.
//!
//! [`Transport`] is the interface. [`Stream`] implements it over a TCP connection or over the two pipes of ssh.
//!
//! Promises of every implementation
//! * A call ends at its deadline, with [`io::ErrorKind::TimedOut`].
//! * Bytes arrive in the order in which they were sent.
//! * [`Transport::send_file`] does not copy the bytes of the file to this process. The kernel may send them after the
//!   call has returned. The caller must therefore not change them until the other side has acknowledged them.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

/// A byte stream in both directions; see the head of this file.
pub trait Transport: Send {
    /// Fills a buffer. Fails with [`io::ErrorKind::UnexpectedEof`] if the other side has closed the stream.
    fn receive(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()>;

    /// Sends all of `bytes`.
    fn send(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()>;

    /// Sends `bytes` bytes of `file`, from `offset` on. Fails if the file is shorter.
    fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        deadline: Instant,
    ) -> io::Result<()>;
}

/// Time of silence after which TCP probes the other host.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(20);
/// Time between two probes.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
/// Number of unanswered probes after which the connection counts as broken: 40 s of silence in all.
const KEEP_ALIVE_TRIES: u32 = 4;

/// A [`Transport`] over a TCP connection, or over two pipes.
pub struct Stream {
    input: OwnedFd,
    output: OwnedFd,
}

impl Stream {
    /// Makes a stream over a TCP connection, and turns on its keep-alive probes.
    pub fn over_tcp(socket: TcpStream) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, KEEP_ALIVE_AFTER)?;
        sockopt::set_tcp_keepintvl(&socket, KEEP_ALIVE_EVERY)?;
        sockopt::set_tcp_keepcnt(&socket, KEEP_ALIVE_TRIES)?;
        let output = OwnedFd::from(socket);
        Self::over_pipes(output.try_clone()?, output)
    }

    /// Makes a stream that reads from `input` and writes to `output`. Both become non-blocking.
    pub fn over_pipes(input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        for fd in [&input, &output] {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        Ok(Self { input, output })
    }
}

impl Transport for Stream {
    fn receive(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut filled_bytes = 0;
        while filled_bytes < buffer.len() {
            match rustix::io::read(&self.input, &mut buffer[filled_bytes..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled_bytes += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_until_ready(&self.input, PollFlags::IN, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        let mut unsent = bytes;
        while !unsent.is_empty() {
            match rustix::io::write(&self.output, unsent) {
                Ok(count) => unsent = &unsent[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_until_ready(&self.output, PollFlags::OUT, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
            check_deadline(deadline)?;
        }
        Ok(())
    }

    /// Sends a range of a file by sendfile(2), so that this process does not copy its bytes. Waits when the other side
    /// is slow, at most until the deadline.
    fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut position = offset;
        let end = offset + bytes;
        while position < end {
            let unsent_bytes = usize::try_from(end - position).unwrap_or(usize::MAX);
            // sendfile(2) moves `position` forward.
            match rustix::fs::sendfile(&self.output, file, Some(&mut position), unsent_bytes) {
                // The file ends before the requested range does.
                Ok(0) => return Err(io::ErrorKind::InvalidData.into()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_until_ready(&self.output, PollFlags::OUT, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
            check_deadline(deadline)?;
        }
        Ok(())
    }
}

/// Fails after the deadline. A peer that receives only a few bytes at a time must not prolong a call.
fn check_deadline(deadline: Instant) -> io::Result<()> {
    if Instant::now() >= deadline {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}

/// Waits until a descriptor is ready, but not beyond the deadline.
fn wait_until_ready(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        if remaining_time.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A time that poll(2) cannot express counts as no timeout.
        let timeout = Timespec::try_from(remaining_time).ok();
        match poll(&mut [PollFd::new(&fd, flags)], timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const SHORT_TIMEOUT: Duration = Duration::from_millis(300);
    const LONG_TIMEOUT: Duration = Duration::from_secs(30);

    /// Both ends of a connection: a stream, and the other side's socket.
    fn pair() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other_end = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        (Stream::over_tcp(socket).unwrap(), other_end)
    }

    fn is_timeout(result: io::Result<()>) -> bool {
        result.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
    }

    #[test]
    fn bytes_of_a_file_arrive_in_order_with_other_bytes() {
        let (mut stream, mut other_end) = pair();
        let file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..9_u32 << 20).map(|index| (index % 251) as u8).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &data, 0).unwrap();
        let deadline = Instant::now() + LONG_TIMEOUT;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                stream.send(b"before", deadline).unwrap();
                stream
                    .send_file(file.as_fd(), 77, (8 << 20) + 1, deadline)
                    .unwrap();
                stream.send(b"after", deadline).unwrap();
                let beyond = stream.send_file(file.as_fd(), 8 << 20, 2 << 20, deadline);
                assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::InvalidData);
            });
            let mut received = vec![0; 6 + (8 << 20) + 1 + 5];
            other_end.read_exact(&mut received).unwrap();
            assert_eq!(&received[..6], b"before");
            assert!(received[6..6 + (8 << 20) + 1] == data[77..78 + (8 << 20)]);
            assert_eq!(&received[6 + (8 << 20) + 1..], b"after");
            let mut rest = vec![0; 1 << 20];
            other_end.read_exact(&mut rest).unwrap();
        });
    }

    #[test]
    fn a_peer_that_is_silent_or_slow_does_not_prolong_a_call() {
        let (mut stream, mut other_end) = pair();
        assert!(is_timeout(
            stream.receive(&mut [0; 1], Instant::now() + SHORT_TIMEOUT)
        ));
        let file = tempfile::tempfile().unwrap();
        file.set_len(256 << 20).unwrap();
        let send = |stream: &mut Stream| {
            stream.send_file(file.as_fd(), 0, 256 << 20, Instant::now() + SHORT_TIMEOUT)
        };
        assert!(is_timeout(send(&mut stream)));
        let more_than_buffers = vec![0; 64 << 20];
        assert!(is_timeout(
            stream.send(&more_than_buffers, Instant::now() + SHORT_TIMEOUT)
        ));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    other_end.read_exact(&mut [0; 4096]).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            assert!(is_timeout(send(&mut stream)));
            stop.store(true, Ordering::Relaxed);
        });
    }
}
