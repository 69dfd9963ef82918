//! Whether bytes are encrypted on their way, and who says so.
//!
//! Each side has a wish for the connection, the handshake carries both, and both proofs are over them: who changes one on its
//! way ends the connection. `auto` wants encryption where the other side has an address that is not private, since what
//! is between the two is then nobody's cluster.

use std::net::{IpAddr, Ipv6Addr};

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
    /// As the other side wants.
    Possible,
    /// Not without.
    Required,
}

impl Encrypt {
    /// The wish towards a peer with this address.
    pub fn towards(self, peer: IpAddr) -> Encryption {
        match self {
            Self::No => Encryption::Refused,
            Self::Auto if is_private(peer) => Encryption::Possible,
            Self::Auto | Self::Yes => Encryption::Required,
        }
    }
}

impl Encryption {
    /// Whether a connection is encrypted where the one side wishes this and the other `peer`.
    pub(crate) fn agree(self, peer: Self) -> Result<bool, WireError> {
        match (self, peer) {
            (Self::Required, Self::Refused) => Err(WireError::PeerRefusesEncryption),
            (Self::Refused, Self::Required) => Err(WireError::PeerRequiresEncryption),
            (own, peer) => Ok(own == Self::Required || peer == Self::Required),
        }
    }

    /// Told apart in a proof.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Refused => 0,
            Self::Possible => 1,
            Self::Required => 2,
        }
    }
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

    #[test]
    fn two_sides_agree_on_encryption_or_one_of_them_says_why_not() {
        use Encryption::{Possible, Refused, Required};
        let wishes = [Refused, Possible, Required];
        for own in wishes {
            for peer in wishes {
                let clash = [own, peer].contains(&Refused) && [own, peer].contains(&Required);
                let found = own.agree(peer);
                assert_eq!(found.is_err(), clash, "{own:?} {peer:?}");
                assert_eq!(found.ok(), peer.agree(own).ok());
            }
        }
        assert!(Possible.agree(Required).unwrap());
        assert!(!Possible.agree(Possible).unwrap());
    }
}
