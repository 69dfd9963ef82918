//! What carries messages and bytes of files between an agent and a puller.
//!
//! [`Transport`] is the seam. [`Stream`] is the one that is always there: a TCP connection, or the two pipes of an ssh.
//!
//! Promises of every implementation
//! * A call ends at its deadline, with [`io::ErrorKind::TimedOut`].
//! * Bytes arrive in the order in which they were sent.
//! * [`Transport::send_file`] does not copy the bytes of the file to this process. They may leave the host after it
//!   has returned: until the other side says that it has them they must stay as they are.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

/// See the head of this file.
pub trait Transport: Send {
    /// Fills `into`; [`io::ErrorKind::UnexpectedEof`] where the other side has ended.
    fn receive(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<()>;

    /// Sends all of `bytes`.
    fn send(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()>;

    /// Sends `bytes` bytes of `file`, from `at` on.
    fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        at: u64,
        bytes: u64,
        deadline: Instant,
    ) -> io::Result<()>;
}

/// Seconds of silence after which the kernel asks whether the other host is still there.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(20);
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEP_ALIVE_TRIES: u32 = 4;

/// A TCP connection, or two pipes.
pub struct Stream {
    input: OwnedFd,
    output: OwnedFd,
}

impl Stream {
    /// Over a connection.
    pub fn over_tcp(socket: TcpStream) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, KEEP_ALIVE_AFTER)?;
        sockopt::set_tcp_keepintvl(&socket, KEEP_ALIVE_EVERY)?;
        sockopt::set_tcp_keepcnt(&socket, KEEP_ALIVE_TRIES)?;
        let output = OwnedFd::from(socket);
        Self::over_pipes(output.try_clone()?, output)
    }

    /// Over what is read from and what is written to, which become non-blocking.
    pub fn over_pipes(input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        for fd in [&input, &output] {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        Ok(Self { input, output })
    }
}

impl Transport for Stream {
    fn receive(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match rustix::io::read(&self.input, &mut into[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_for(&self.input, PollFlags::IN, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        let mut left = bytes;
        while !left.is_empty() {
            match rustix::io::write(&self.output, left) {
                Ok(count) => left = &left[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_for(&self.output, PollFlags::OUT, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
            check_time(deadline)?;
        }
        Ok(())
    }

    fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        at: u64,
        bytes: u64,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut offset = at;
        let end = at + bytes;
        while offset < end {
            let left = usize::try_from(end - offset).unwrap_or(usize::MAX);
            match rustix::fs::sendfile(&self.output, file, Some(&mut offset), left) {
                // The arena is shorter than its list says.
                Ok(0) => return Err(io::ErrorKind::InvalidData.into()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_for(&self.output, PollFlags::OUT, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
            check_time(deadline)?;
        }
        Ok(())
    }
}

/// A peer that takes a byte now and then is late all the same.
fn check_time(deadline: Instant) -> io::Result<()> {
    if Instant::now() >= deadline {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}

fn wait_for(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let timeout = Timespec::try_from(left).ok();
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

    const SOON: Duration = Duration::from_millis(300);
    const LIMIT: Duration = Duration::from_secs(30);

    fn pair() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let here = listener.accept().unwrap().0;
        (Stream::over_tcp(here).unwrap(), there)
    }

    fn is_late(result: io::Result<()>) -> bool {
        result.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
    }

    #[test]
    fn bytes_of_a_file_arrive_with_those_between_them() {
        let (mut here, mut there) = pair();
        let file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..9_u32 << 20).map(|at| (at % 251) as u8).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &data, 0).unwrap();
        let deadline = Instant::now() + LIMIT;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                here.send(b"before", deadline).unwrap();
                here.send_file(file.as_fd(), 77, (8 << 20) + 1, deadline)
                    .unwrap();
                here.send(b"after", deadline).unwrap();
                let beyond = here.send_file(file.as_fd(), 8 << 20, 2 << 20, deadline);
                assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::InvalidData);
            });
            let mut found = vec![0; 6 + (8 << 20) + 1 + 5];
            there.read_exact(&mut found).unwrap();
            assert_eq!(&found[..6], b"before");
            assert!(found[6..6 + (8 << 20) + 1] == data[77..78 + (8 << 20)]);
            assert_eq!(&found[6 + (8 << 20) + 1..], b"after");
            let mut rest = vec![0; 1 << 20];
            there.read_exact(&mut rest).unwrap();
        });
    }

    #[test]
    fn who_takes_nothing_says_nothing_or_takes_a_byte_now_and_then_is_late() {
        let (mut here, mut there) = pair();
        assert!(is_late(here.receive(&mut [0; 1], Instant::now() + SOON)));
        let file = tempfile::tempfile().unwrap();
        file.set_len(256 << 20).unwrap();
        let send =
            |here: &mut Stream| here.send_file(file.as_fd(), 0, 256 << 20, Instant::now() + SOON);
        assert!(is_late(send(&mut here)));
        let much = vec![0; 64 << 20];
        assert!(is_late(here.send(&much, Instant::now() + SOON)));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    there.read_exact(&mut [0; 4096]).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            assert!(is_late(send(&mut here)));
            stop.store(true, Ordering::Relaxed);
        });
    }
}
