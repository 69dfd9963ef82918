//! Whether bytes of files are encrypted on their way, and which side demands it.
//!
//! Each side says in the handshake what it wishes and between which addresses it sees the connection. From both
//! together both decide the same ([`Side::agree`]); a change of a word of it on its way ends the connection.
//!
//! `auto` wants encryption in two cases. The other side has an address that is not private: the network between the two is
//! then not that of one cluster. Or the two sides see different addresses: then a router that translates addresses, a
//! forwarded port or a stranger ends one connection and begins another.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};

use serde::{Deserialize, Serialize};

use crate::error::WireError;

/// What the user says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encrypt {
    /// Where the other side's address is not private.
    #[default]
    Auto,
    /// Always.
    Yes,
    /// Never.
    No,
}

/// What one side wishes for one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Encryption {
    /// It cannot, or its user does not want it.
    Refused,
    /// As the other side wants, if both sides see the same addresses.
    Possible,
    /// Refuses a connection without it.
    Required,
}

impl Encrypt {
    /// The wish towards a peer with this address.
    fn towards(self, peer: IpAddr) -> Encryption {
        match self {
            Self::No => Encryption::Refused,
            Self::Auto if is_private(peer) => Encryption::Possible,
            Self::Auto | Self::Yes => Encryption::Required,
        }
    }
}

/// What one side says of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Its wish.
    pub encryption: Encryption,
    /// Its own end as it sees it; none over pipes.
    pub here: Option<SocketAddr>,
    /// Address of the other side.
    pub there: Option<SocketAddr>,
}

impl Side {
    /// The side of a TCP connection.
    pub fn of_tcp(socket: &TcpStream, encrypt: Encrypt) -> io::Result<Self> {
        let there = socket.peer_addr()?;
        Ok(Self {
            encryption: encrypt.towards(there.ip()),
            here: Some(canonical(socket.local_addr()?)),
            there: Some(canonical(there)),
        })
    }

    /// The side of pipes, whose carrier encrypts.
    pub fn of_pipes() -> Self {
        Self {
            encryption: Encryption::Refused,
            here: None,
            there: None,
        }
    }

    /// Whether the connection is encrypted where the one side says this and the other `peer`.
    pub(crate) fn agree(&self, peer: &Self) -> Result<bool, WireError> {
        use Encryption::{Possible, Refused, Required};
        let is_direct = self.here == peer.there && self.there == peer.here;
        let wish = |side: &Self| match side.encryption {
            Possible if !is_direct => Required,
            wish => wish,
        };
        match (wish(self), wish(peer)) {
            (Required, Refused) => Err(WireError::PeerRefusesEncryption),
            (Refused, Required) => Err(WireError::PeerRequiresEncryption),
            (own, peer) => Ok(own == Required || peer == Required),
        }
    }
}

/// One form of an address: a socket may name an IPv4 address in two ways.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Whether an address is of this host, its link, or a network that the Internet does not route (RFC 1918, RFC 4193).
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
                Encrypt::Auto.towards(address),
                Encryption::Possible,
                "{text}"
            );
            assert_eq!(Encrypt::Yes.towards(address), Encryption::Required);
        }
        for text in public {
            let address = text.parse().unwrap();
            assert_eq!(
                Encrypt::Auto.towards(address),
                Encryption::Required,
                "{text}"
            );
            assert_eq!(Encrypt::No.towards(address), Encryption::Refused);
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
        let wishes = [Refused, Possible, Required];
        let (a, b) = ("10.0.0.1:5", "10.0.0.2:6");
        let agree = |own, peer| side(own, a, b).agree(&side(peer, b, a));
        for own in wishes {
            for peer in wishes {
                let clash = [own, peer].contains(&Refused) && [own, peer].contains(&Required);
                let found = agree(own, peer);
                assert_eq!(found.is_err(), clash, "{own:?} {peer:?}");
                assert_eq!(found.ok(), agree(peer, own).ok());
            }
        }
        assert!(agree(Possible, Required).unwrap());
        assert!(!agree(Possible, Possible).unwrap());
    }

    #[test]
    fn who_is_between_two_private_addresses_does_not_take_encryption_away() {
        use Encryption::{Possible, Refused};
        let (puller, agent) = ("10.0.0.1:5", "10.0.0.2:6");
        for (here, there) in [
            // Another host, another port of the same host, both.
            ("10.0.0.2:6", "10.0.0.9:5"),
            ("10.0.0.2:6", "10.0.0.1:7"),
            ("127.0.0.1:6", "127.0.0.1:7"),
            ("", ""),
        ] {
            let agree = |own, peer| side(own, puller, agent).agree(&side(peer, here, there));
            assert!(agree(Possible, Possible).unwrap(), "{here} {there}");
            assert!(agree(Possible, Refused).is_err());
            assert!(agree(Refused, Possible).is_err());
            assert!(!agree(Refused, Refused).unwrap());
        }
        let mapped = "[::ffff:10.0.0.1]:5".parse().unwrap();
        assert_eq!(canonical(mapped), puller.parse().unwrap());
        assert!(!Side::of_pipes().agree(&Side::of_pipes()).unwrap());
    }
}
