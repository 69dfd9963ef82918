//! Who may: challenge and response with a key that both sides have.
//!
//! ```text
//!   puller                                     agent
//!     │── Hello {nonce p} ─────────────────────►│
//!     │◄───────────────────── Challenge {nonce a}│
//!     │── Proof {HMAC(key, "puller", p, a)} ───►│   compared in constant time
//!     │◄───── Welcome {HMAC(key, "agent", p, a)}│   and by the puller too
//! ```
//!
//! Promises
//! * The key is never sent, and a proof is of one connection: each side has a nonce in it, so nothing that was heard
//!   can be used again, nor sent back to where it came from.
//! * Who has not shown the key makes the agent read [`HANDSHAKE_BYTES_MAX`] bytes at a time, until one deadline for the
//!   whole handshake, and hears a nonce of it and nothing else.

use std::fmt;
use std::time::Instant;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::WireError;
use crate::link::Link;
use crate::message::{
    FRAME_BYTES_MAX, HANDSHAKE_BYTES_MAX, Nonce, PROTOCOL_VERSION, Proof, Reply, Request,
};
use crate::transport::Transport;

const KEY_BYTES: usize = 32;
/// Tells these proofs from all other uses of a key.
const CONTEXT: &[u8] = b"firn-agent 1";

/// What agent and puller both have.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; KEY_BYTES]);

/// Whose proof it is.
#[derive(Clone, Copy)]
enum Side {
    Puller,
    Agent,
}

impl Key {
    /// A new one.
    pub fn random() -> Result<Self, getrandom::Error> {
        Ok(Self(random_bytes()?))
    }

    /// As [`Key::digits`] writes it.
    pub fn from_digits(digits: &str) -> Option<Self> {
        let digits = digits.as_bytes();
        if digits.len() != 2 * KEY_BYTES {
            return None;
        }
        let mut key = [0; KEY_BYTES];
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16);
            *byte = (digit(0)? << 4 | digit(1)?) as u8;
        }
        Some(Self(key))
    }

    /// In hexadecimal.
    pub fn digits(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn mac(&self, side: Side, puller: &Nonce, agent: &Nonce) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(CONTEXT);
        mac.update(match side {
            Side::Puller => b" puller ",
            Side::Agent => b" agent  ",
        });
        mac.update(puller);
        mac.update(agent);
        mac
    }

    fn prove(&self, side: Side, puller: &Nonce, agent: &Nonce) -> Proof {
        self.mac(side, puller, agent).finalize().into_bytes().into()
    }

    /// Takes as long for a proof that is wrong in its first byte as for one that is wrong in its last.
    fn verify(&self, side: Side, puller: &Nonce, agent: &Nonce, proof: &Proof) -> bool {
        self.mac(side, puller, agent).verify_slice(proof).is_ok()
    }
}

/// Not the key.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

fn random_bytes() -> Result<[u8; 32], getrandom::Error> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

fn nonce() -> Result<Nonce, WireError> {
    random_bytes().map_err(|error| WireError::Io(std::io::Error::other(error.to_string())))
}

/// The agent's side. Without a key the connection itself says who is there.
pub fn answer_handshake<T: Transport>(
    link: &mut Link<T>,
    key: Option<&Key>,
    until: Instant,
) -> Result<(), WireError> {
    let (protocol, puller) = match link.receive(HANDSHAKE_BYTES_MAX, until)? {
        Request::Hello { protocol, nonce } => (protocol, nonce),
        _ => return Err(WireError::NoHello),
    };
    let mut welcome = Reply::Welcome {
        protocol: PROTOCOL_VERSION,
        proof: None,
        version: env!("CARGO_PKG_VERSION").into(),
    };
    let agent = nonce()?;
    if let Some(key) = key {
        let challenge = Reply::Challenge {
            protocol: PROTOCOL_VERSION,
            nonce: agent,
        };
        link.send(&challenge, until)?;
        check_version(protocol)?;
        let Request::Proof { proof } = link.receive(HANDSHAKE_BYTES_MAX, until)? else {
            return Err(WireError::WrongKey);
        };
        if !key.verify(Side::Puller, &puller, &agent, &proof) {
            return Err(WireError::WrongKey);
        }
        if let Reply::Welcome { proof, .. } = &mut welcome {
            *proof = Some(key.prove(Side::Agent, &puller, &agent));
        }
    }
    link.send(&welcome, until)?;
    check_version(protocol)
}

/// The puller's side.
pub fn begin_handshake<T: Transport>(
    link: &mut Link<T>,
    key: Option<&Key>,
    until: Instant,
) -> Result<(), WireError> {
    let puller = nonce()?;
    let hello = Request::Hello {
        protocol: PROTOCOL_VERSION,
        nonce: puller,
    };
    link.send(&hello, until)?;
    let Some(key) = key else {
        return match link.receive(FRAME_BYTES_MAX, until)? {
            Reply::Welcome { protocol, .. } => check_version(protocol),
            _ => Err(WireError::NoHello),
        };
    };
    let agent = match link.receive(HANDSHAKE_BYTES_MAX, until)? {
        Reply::Challenge { protocol, nonce } => {
            check_version(protocol)?;
            nonce
        }
        _ => return Err(WireError::NoHello),
    };
    let proof = key.prove(Side::Puller, &puller, &agent);
    link.send(&Request::Proof { proof }, until)?;
    match link.receive(HANDSHAKE_BYTES_MAX, until) {
        Ok(Reply::Welcome {
            proof: Some(proof), ..
        }) if key.verify(Side::Agent, &puller, &agent, &proof) => Ok(()),
        // An agent says nothing to a wrong key.
        Ok(_) | Err(WireError::Ended) => Err(WireError::WrongKey),
        Err(error) => Err(error),
    }
}

fn check_version(found: u32) -> Result<(), WireError> {
    if found == PROTOCOL_VERSION {
        return Ok(());
    }
    Err(WireError::Version { found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_its_side_its_key_and_its_connection() {
        let key = Key::random().unwrap();
        let other = Key::random().unwrap();
        let (p, a) = ([1; 32], [2; 32]);
        let proof = key.prove(Side::Puller, &p, &a);
        assert!(key.verify(Side::Puller, &p, &a, &proof));
        assert!(!key.verify(Side::Agent, &p, &a, &proof), "sent back");
        assert!(!key.verify(Side::Puller, &a, &p, &proof), "nonces swapped");
        assert!(!key.verify(Side::Puller, &p, &[3; 32], &proof), "replayed");
        assert!(!other.verify(Side::Puller, &p, &a, &proof), "another key");
    }

    #[test]
    fn a_key_is_written_as_digits_and_read_again() {
        let key = Key::random().unwrap();
        assert_eq!(Key::from_digits(&key.digits()), Some(key.clone()));
        for digits in ["", "00", &"g".repeat(64), &"0".repeat(65)] {
            assert_eq!(Key::from_digits(digits), None, "{digits}");
        }
        assert!(!format!("{key:?}").contains(&key.digits()));
    }
}
