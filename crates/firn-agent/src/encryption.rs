//! The decision whether the bytes of files are encrypted on a connection between two hosts.
//!
//! In the handshake each side states whether it refuses, allows or requires encryption, and the two addresses of the
//! connection as it sees them. Both sides compute the same decision from both statements
//! ([`Side::negotiate_encryption`]). If a statement is changed on its way, the connection ends.
//!
//! `auto` requires encryption in two cases:
//!
//! * The other side's address is not private. The network between the two sides is then not that of one cluster.
//! * The two sides see different addresses. There is then a device between them that ends one connection and begins
//!   another: a router that translates addresses, a forwarded port, or an attacker.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};

use serde::{Deserialize, Serialize};

use crate::error::WireError;

/// The user's option `--encrypt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encrypt {
    /// Requires encryption if the other side's address is not private, or if the two sides see different addresses.
    #[default]
    Auto,
    /// Requires encryption always.
    Yes,
    /// Refuses encryption.
    No,
}

/// The statement of one side about the encryption of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Encryption {
    /// The side does not encrypt.
    Refused,
    /// The other side decides. If the two sides see different addresses, this counts as required.
    Possible,
    /// The side accepts no connection without encryption.
    Required,
}

impl Encrypt {
    /// Returns the statement that this option makes to a peer with this address.
    fn statement_for(self, peer_ip: IpAddr) -> Encryption {
        match self {
            Self::No => Encryption::Refused,
            Self::Auto if is_private(peer_ip) => Encryption::Possible,
            Self::Auto | Self::Yes => Encryption::Required,
        }
    }
}

/// The statement of one side about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Whether this side refuses, allows or requires encryption.
    pub encryption: Encryption,
    /// This side's own address as it sees it; `None` over pipes.
    pub here: Option<SocketAddr>,
    /// The other side's address as this side sees it; `None` over pipes.
    pub there: Option<SocketAddr>,
}

impl Side {
    /// Makes the statement about a TCP connection.
    pub fn from_tcp(socket: &TcpStream, encrypt: Encrypt) -> io::Result<Self> {
        let peer_address = socket.peer_addr()?;
        let local_address = socket.local_addr()?;
        Ok(Self {
            encryption: encrypt.statement_for(peer_address.ip()),
            here: Some(canonical(local_address)),
            there: Some(canonical(peer_address)),
        })
    }

    /// Makes the statement about pipes. ssh, which carries them, encrypts already.
    pub fn for_pipes() -> Self {
        Self {
            encryption: Encryption::Refused,
            here: None,
            there: None,
        }
    }

    /// Returns whether files' bytes are encrypted, given the statements of both sides. Fails if one side requires
    /// encryption and the other one refuses it.
    pub(crate) fn negotiate_encryption(&self, peer: &Self) -> Result<bool, WireError> {
        use Encryption::{Possible, Refused, Required};
        // If the two sides see different addresses, a device between them ends one connection and begins another.
        let is_direct = self.here == peer.there && self.there == peer.here;
        let effective_statement = |side: &Self| match side.encryption {
            Possible if !is_direct => Required,
            stated => stated,
        };
        match (effective_statement(self), effective_statement(peer)) {
            (Required, Refused) => Err(WireError::PeerRefusesEncryption),
            (Refused, Required) => Err(WireError::PeerRequiresEncryption),
            (Required, _) | (_, Required) => Ok(true),
            (Possible | Refused, Possible | Refused) => Ok(false),
        }
    }
}

/// Returns the canonical form of an address, because a socket may show an IPv4 address as an IPv6 one.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Whether an address belongs to this host, to its link, or to a private network (RFC 1918, RFC 4193).
fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_private() || v4.is_loopback() || v4.is_link_local(),
        IpAddr::V6(v6) => {
            v6 == Ipv6Addr::LOCALHOST || v6.is_unique_local() || v6.is_unicast_link_local()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_address_that_is_not_private_requires_encryption_by_itself() {
        let private = [
            "127.0.0.1",
            "10.255.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.7.7",
            "169.254.1.1",
            "::1",
            "fd00::1",
            "fe80::1",
            "::ffff:10.0.0.1",
        ];
        let public = [
            "128.3.5.7",
            "172.15.0.1",
            "172.32.0.1",
            "100.64.0.1",
            "2001:db8::1",
            "::ffff:8.8.8.8",
            "0.0.0.0",
        ];
        for text in private {
            let address = text.parse().unwrap();
            assert_eq!(
                Encrypt::Auto.statement_for(address),
                Encryption::Possible,
                "{text}"
            );
            assert_eq!(Encrypt::Yes.statement_for(address), Encryption::Required);
        }
        for text in public {
            let address = text.parse().unwrap();
            assert_eq!(
                Encrypt::Auto.statement_for(address),
                Encryption::Required,
                "{text}"
            );
            assert_eq!(Encrypt::No.statement_for(address), Encryption::Refused);
        }
    }

    fn side(encryption: Encryption, here: &str, there: &str) -> Side {
        Side {
            encryption,
            here: here.parse().ok(),
            there: there.parse().ok(),
        }
    }

    #[test]
    fn two_sides_agree_on_encryption_or_one_of_them_says_why_not() {
        use Encryption::{Possible, Refused, Required};
        let statements = [Refused, Possible, Required];
        let (a, b) = ("10.0.0.1:5", "10.0.0.2:6");
        let agree = |own, peer| side(own, a, b).negotiate_encryption(&side(peer, b, a));
        for own in statements {
            for peer in statements {
                let is_conflict = [own, peer].contains(&Refused) && [own, peer].contains(&Required);
                let decision = agree(own, peer);
                assert_eq!(decision.is_err(), is_conflict, "{own:?} {peer:?}");
                assert_eq!(decision.ok(), agree(peer, own).ok());
            }
        }
        assert!(agree(Possible, Required).unwrap());
        assert!(!agree(Possible, Possible).unwrap());
    }

    #[test]
    fn a_relay_between_two_private_addresses_does_not_switch_encryption_off() {
        use Encryption::{Possible, Refused};
        let (puller, agent) = ("10.0.0.1:5", "10.0.0.2:6");
        for (here, there) in [
            // The agent sees another host, another port of the same host, or both; or no addresses.
            ("10.0.0.2:6", "10.0.0.9:5"),
            ("10.0.0.2:6", "10.0.0.1:7"),
            ("127.0.0.1:6", "127.0.0.1:7"),
            ("", ""),
        ] {
            let agree =
                |own, peer| side(own, puller, agent).negotiate_encryption(&side(peer, here, there));
            assert!(agree(Possible, Possible).unwrap(), "{here} {there}");
            assert!(agree(Possible, Refused).is_err());
            assert!(agree(Refused, Possible).is_err());
            assert!(!agree(Refused, Refused).unwrap());
        }
        let mapped = "[::ffff:10.0.0.1]:5".parse().unwrap();
        assert_eq!(canonical(mapped), puller.parse().unwrap());
        assert!(
            !Side::for_pipes()
                .negotiate_encryption(&Side::for_pipes())
                .unwrap()
        );
    }
}
