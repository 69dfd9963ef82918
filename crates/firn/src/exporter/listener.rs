//! The listening sockets of the exporter: TCP, a Unix socket, or sockets that systemd passes to the process.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use listenfd::ListenFd;

use crate::failure::{FAILED, Failure};
use crate::text;

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A TCP address, such as `127.0.0.1:9945` or `[::1]:9945`.
    Tcp(SocketAddr),
    /// The path of a Unix socket, written as `unix:/run/firn.sock`.
    Unix(PathBuf),
}

impl std::str::FromStr for Address {
    type Err = String;

    /// Parses `HOST:PORT`, or `unix:` and an absolute path.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err("write an absolute path for a Unix socket, such as unix:/run/firn.sock".into())
            };
        }
        text.parse().map(Self::Tcp).map_err(|_| {
            "write an address such as 127.0.0.1:9945, [::1]:9945 or unix:/run/firn.sock; 0.0.0.0 and [::] are all addresses of the host".into()
        })
    }
}

/// A listening socket. accept(2) on it never blocks.
pub enum Listener {
    Tcp(TcpListener),
    /// The second value is `None` for a socket that systemd created.
    Unix(UnixListener, Option<OwnSocket>),
}

/// A Unix socket that this process created. Its file is removed when the value is dropped.
pub struct OwnSocket {
    /// Path of the socket.
    path: PathBuf,
    /// Inode number of the socket, so that a later socket of the same path is not removed.
    inode: u64,
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        let is_ours = |metadata: std::fs::Metadata| metadata.ino() == self.inode;
        if self.path.symlink_metadata().is_ok_and(is_ours) {
            // A socket file that stays has no listener, so clients are refused.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The connection of a client.
pub enum Client {
    Tcp(std::net::TcpStream),
    Unix(UnixStream),
}

impl Listener {
    /// Returns the sockets that systemd passed to this process. The list is empty if it passed none.
    pub fn from_systemd() -> Result<Vec<Self>, Failure> {
        let unusable = |error: io::Error| {
            let text = format!(
                "a socket from systemd (LISTEN_FDS) is not a listening stream socket: {error}"
            );
            Failure::new(FAILED, text)
        };
        let mut passed_fds = ListenFd::from_env();
        let mut listeners = Vec::new();
        for index in 0..passed_fds.len() {
            // An error means that the socket is not a TCP socket. The descriptor then remains for the second try.
            let listener = match passed_fds.take_tcp_listener(index) {
                Ok(tcp) => tcp.map(Self::Tcp),
                Err(_) => {
                    let unix = passed_fds.take_unix_listener(index).map_err(unusable)?;
                    unix.map(|unix| Self::Unix(unix, None))
                }
            };
            let Some(listener) = listener else {
                continue;
            };
            listener.set_nonblocking().map_err(unusable)?;
            listeners.push(listener);
        }
        Ok(listeners)
    }

    /// Listens at an address. Returns a failure if the address cannot be used.
    pub fn bind(address: &Address) -> Result<Self, Failure> {
        Self::bind_nonblocking(address).map_err(|error| {
            let shown_address = match address {
                Address::Tcp(address) => address.to_string(),
                Address::Unix(path) => text::path(path),
            };
            Failure::new(
                FAILED,
                format!(
                    "cannot listen at {shown_address}: {error}; name another address with --listen"
                ),
            )
        })
    }

    fn bind_nonblocking(address: &Address) -> io::Result<Self> {
        let listener = match address {
            Address::Tcp(address) => Self::Tcp(TcpListener::bind(address)?),
            Address::Unix(path) => bind_unix(path)?,
        };
        listener.set_nonblocking()?;
        Ok(listener)
    }

    /// Returns the address for messages to the user.
    pub fn shown_address(&self) -> String {
        match self {
            Self::Tcp(tcp) => match tcp.local_addr() {
                Ok(address) => format!("http://{address}/metrics"),
                Err(_) => "a socket".into(),
            },
            Self::Unix(_, Some(own)) => text::path(&own.path),
            Self::Unix(_, None) => "a socket of systemd".into(),
        }
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.set_nonblocking(true),
            Self::Unix(unix, _) => unix.set_nonblocking(true),
        }
    }

    /// Accepts the next client. Returns `None` if the client has closed its connection again.
    pub fn accept(&self) -> io::Result<Option<Client>> {
        let accepted = match self {
            Self::Tcp(tcp) => tcp.accept().map(|(client, _)| Client::Tcp(client)),
            Self::Unix(unix, _) => unix.accept().map(|(client, _)| Client::Unix(client)),
        };
        match accepted {
            Ok(client) => {
                client.set_nonblocking()?;
                Ok(Some(client))
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(tcp) => tcp.as_fd(),
            Self::Unix(unix, _) => unix.as_fd(),
        }
    }
}

/// Listens at a Unix socket. A socket file without a listening process is left from a killed exporter, and is replaced.
fn bind_unix(path: &Path) -> io::Result<Listener> {
    let is_socket = |metadata: std::fs::Metadata| metadata.file_type().is_socket();
    if path.symlink_metadata().is_ok_and(is_socket)
        && let Err(error) = UnixStream::connect(path)
        && error.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    let own = OwnSocket {
        path: path.to_owned(),
        inode: path.symlink_metadata()?.ino(),
    };
    Ok(Listener::Unix(listener, Some(own)))
}

impl Client {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.set_nonblocking(true),
            Self::Unix(unix) => unix.set_nonblocking(true),
        }
    }
}

impl From<Client> for OwnedFd {
    fn from(client: Client) -> Self {
        match client {
            Client::Tcp(tcp) => tcp.into(),
            Client::Unix(unix) => unix.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_tcp_of_both_kinds_or_a_unix_socket() {
        let tcp = |text: &str| Ok(Address::Tcp(text.parse().unwrap()));
        assert_eq!("127.0.0.1:9945".parse(), tcp("127.0.0.1:9945"));
        assert_eq!("[::1]:80".parse(), tcp("[::1]:80"));
        assert_eq!("unix:/run/x".parse(), Ok(Address::Unix("/run/x".into())));
        for wrong in ["", "9945", "host:1", "unix:x", "::1:80"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_unix_socket_that_a_kill_left_is_replaced_and_one_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&Address::Unix(path.clone())).ok().unwrap();
        assert!(Listener::bind(&Address::Unix(path.clone())).is_err());
        drop(listener);
        assert!(!path.exists());
    }
}
