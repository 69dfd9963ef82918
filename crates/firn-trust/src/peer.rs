//! Identifies the process at the other end of a Unix socket, and checks its user.

use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

/// The process at the other end of a connected socket. For a listening socket it is the process that called
/// listen(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process id. `None` if the process is in a PID namespace that this process cannot see.
    pub pid: Option<NonZeroU32>,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

/// The reason why a peer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// The kernel does not report the user.
    #[error("cannot find out as which user the peer of this connection runs: {0}")]
    Unknown(Errno),
    /// The peer is another user.
    #[error("the peer of this connection runs as user {found}, expected user {expected}")]
    Other {
        /// User of the peer.
        found: u32,
        /// The expected user.
        expected: u32,
    },
}

/// Returns the process at the other end (`SO_PEERCRED`, unix(7)). The function allocates no memory and does not
/// change `errno`.
///
/// `rustix::net::sockopt::socket_peercred` must not be used here. Its process id cannot be 0, but the kernel reports
/// 0 for a process in a PID namespace that is not visible.
pub fn socket_peer(socket: impl AsFd) -> Result<Peer, Errno> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    let credentials_address = (&raw mut credentials).cast();
    // SAFETY: the kernel writes at most `len` bytes into the structure, which is ours, and the length. The address
    // of this thread's errno is always valid.
    let error = unsafe {
        let errno = libc::__errno_location();
        let saved_errno = *errno;
        let result = libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            credentials_address,
            &raw mut len,
        );
        let error = (result != 0).then(|| Errno::from_raw_os_error(*errno));
        *errno = saved_errno;
        error
    };
    match error {
        Some(errno) => Err(errno),
        None => Ok(Peer {
            pid: NonZeroU32::new(credentials.pid.unsigned_abs()),
            uid: credentials.uid,
            gid: credentials.gid,
        }),
    }
}

/// Checks that the process at the other end of a connected socket belongs to user `uid`. Call it before anything is
/// sent. The function allocates no memory and does not change `errno`.
pub fn check_peer(socket: impl AsFd, uid: u32) -> Result<(), PeerError> {
    let found = socket_peer(socket).map_err(PeerError::Unknown)?.uid;
    if found != uid {
        return Err(PeerError::Other {
            found,
            expected: uid,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_of_another_user_is_told_apart() {
        let (one, _two) = UnixStream::pair().unwrap();
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(check_peer(&one, own), Ok(()));
        assert_eq!(
            check_peer(&one, own + 1),
            Err(PeerError::Other {
                found: own,
                expected: own + 1
            })
        );
    }

    #[test]
    fn a_peer_has_its_process_id_and_what_is_no_socket_has_none_and_keeps_errno() {
        let (one, _two) = UnixStream::pair().unwrap();
        assert_eq!(
            socket_peer(&one).unwrap().pid,
            NonZeroU32::new(std::process::id())
        );
        let file = tempfile::tempfile().unwrap();
        // SAFETY: the address of this thread's errno is always valid.
        let errno = || unsafe { libc::__errno_location() };
        // SAFETY: as above.
        unsafe { *errno() = 77 };
        assert_eq!(socket_peer(&file), Err(Errno::NOTSOCK));
        // SAFETY: as above.
        assert_eq!(unsafe { *errno() }, 77);
    }
}
