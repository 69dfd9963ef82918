//! Who may: challenge and response with a key that both sides have.
//!
//! ```text
//!   puller                                     agent
//!     │── Hello {nonce p, wish} ───────────────►│
//!     │◄─────────────── Challenge {nonce a, wish}│
//!     │── Proof {HMAC(key, "puller", t)} ──────►│   t: nonces and wishes; compared in constant time
//!     │◄─────── Welcome {HMAC(key, "agent", t)}─│   and by the puller too
//! ```
//!
//! The key is that of the agent, or one that came in the hello within a credential ([`crate::munge`]).
//!
//! Where both agree on encryption ([`crate::encryption`]), Proof and Welcome have a message each of an exchange of keys
//! ([`crate::sealed`]), whose shared key is HMAC(key, "noise", t).
//!
//! Promises
//! * The key is never sent, and a proof is of one connection: each side has a nonce in it, so nothing that was heard
//!   can be used again, nor sent back to where it came from; and that nobody took encryption out of a wish.
//! * Who has not shown the key makes the agent read [`HANDSHAKE_BYTES_MAX`] bytes at a time, until one deadline for the
//!   whole handshake, and hears a nonce of it and nothing else.

use std::fmt;
use std::time::Instant;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::encryption::Encryption;
use crate::error::WireError;
use crate::link::Link;
use crate::message::{
    FRAME_BYTES_MAX, HANDSHAKE_BYTES_MAX, Nonce, PROTOCOL_VERSION, Proof, Reply, Request,
};
use crate::munge::Munge;
use crate::sealed::Exchange;
use crate::transport::Transport;

const KEY_BYTES: usize = 32;
/// Tells these proofs from all other uses of a key.
const CONTEXT: &[u8] = b"firn-agent 2";

/// What agent and puller both have.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; KEY_BYTES]);

/// By what one side goes in a handshake.
pub struct Terms<'a> {
    /// None: the connection itself says who is there, or MUNGE.
    pub key: Option<&'a Key>,
    /// The puller's: instead of a key. The agent's: as well as one.
    pub munge: Option<&'a Munge>,
    /// Its wish.
    pub encryption: Encryption,
}

/// What a use of the key is for.
#[derive(Clone, Copy)]
enum Purpose {
    PullerProof,
    AgentProof,
    Noise,
}

/// What both sides have said.
struct Transcript {
    puller: Nonce,
    agent: Nonce,
    puller_wish: Encryption,
    agent_wish: Encryption,
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

    fn mac(&self, purpose: Purpose, said: &Transcript) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(CONTEXT);
        mac.update(match purpose {
            Purpose::PullerProof => b" puller ",
            Purpose::AgentProof => b" agent  ",
            Purpose::Noise => b" noise  ",
        });
        mac.update(&said.puller);
        mac.update(&said.agent);
        mac.update(&[said.puller_wish.code(), said.agent_wish.code()]);
        mac
    }

    fn derive(&self, purpose: Purpose, said: &Transcript) -> Proof {
        self.mac(purpose, said).finalize().into_bytes().into()
    }

    /// Takes as long for a proof that is wrong in its first byte as for one that is wrong in its last.
    fn verify(&self, purpose: Purpose, said: &Transcript, proof: &Proof) -> bool {
        self.mac(purpose, said).verify_slice(proof).is_ok()
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

fn random() -> Result<Nonce, WireError> {
    random_bytes().map_err(|error| WireError::Io(std::io::Error::other(error.to_string())))
}

/// The agent's side.
pub fn answer_handshake<T: Transport>(
    link: &mut Link<T>,
    terms: &Terms<'_>,
    until: Instant,
) -> Result<(), WireError> {
    let (protocol, puller, puller_wish, credential) =
        match link.receive(HANDSHAKE_BYTES_MAX, until)? {
            Request::Hello {
                protocol,
                nonce,
                encryption,
                credential,
            } => (protocol, nonce, encryption, credential),
            _ => return Err(WireError::NoHello),
        };
    let Some(key) = terms.key else {
        link.send(&welcome(None, None), until)?;
        return check_version(protocol);
    };
    let said = Transcript {
        puller,
        agent: random()?,
        puller_wish,
        agent_wish: terms.encryption,
    };
    let challenge = Reply::Challenge {
        protocol: PROTOCOL_VERSION,
        nonce: said.agent,
        encryption: said.agent_wish,
        munge: terms.munge.is_some(),
    };
    link.send(&challenge, until)?;
    check_version(protocol)?;
    let wrapped = match (credential, terms.munge) {
        (Some(credential), Some(munge)) => Some(munge.unwrap(&credential, until)?),
        (Some(_), None) => return Err(WireError::MungeUnwanted),
        (None, _) => None,
    };
    let key = wrapped.as_ref().unwrap_or(key);
    let is_encrypted = said.agent_wish.agree(puller_wish)?;
    let Request::Proof { proof, exchange } = link.receive(HANDSHAKE_BYTES_MAX, until)? else {
        return Err(WireError::WrongKey);
    };
    if !key.verify(Purpose::PullerProof, &said, &proof) {
        return Err(WireError::WrongKey);
    }
    let own_proof = Some(key.derive(Purpose::AgentProof, &said));
    if !is_encrypted {
        return link.send(&welcome(own_proof, None), until);
    }
    let mut own = Exchange::answer(&key.derive(Purpose::Noise, &said));
    own.read(&exchange.ok_or(WireError::WrongKey)?)?;
    let message = own.write()?;
    link.send(&welcome(own_proof, Some(message)), until)?;
    link.seal(own.finish());
    Ok(())
}

fn welcome(proof: Option<Proof>, exchange: Option<Vec<u8>>) -> Reply {
    Reply::Welcome {
        protocol: PROTOCOL_VERSION,
        proof,
        exchange,
        version: env!("CARGO_PKG_VERSION").into(),
    }
}

/// The puller's side.
pub fn begin_handshake<T: Transport>(
    link: &mut Link<T>,
    terms: &Terms<'_>,
    until: Instant,
) -> Result<(), WireError> {
    let puller = random()?;
    let wrapped = match terms.munge {
        Some(munge) => {
            let key = Key(random()?);
            let credential = munge.wrap(&key, until)?;
            Some((key, credential))
        }
        None => None,
    };
    let (own_key, credential) = wrapped.unzip();
    let refused = match &credential {
        Some(_) => WireError::CredentialRefused,
        None => WireError::WrongKey,
    };
    let hello = Request::Hello {
        protocol: PROTOCOL_VERSION,
        nonce: puller,
        encryption: terms.encryption,
        credential,
    };
    link.send(&hello, until)?;
    let Some(key) = own_key.as_ref().or(terms.key) else {
        return match link.receive(FRAME_BYTES_MAX, until)? {
            Reply::Welcome { protocol, .. } => check_version(protocol),
            _ => Err(WireError::NoHello),
        };
    };
    let said = match link.receive(HANDSHAKE_BYTES_MAX, until)? {
        Reply::Challenge {
            protocol,
            nonce,
            encryption,
            munge,
        } => {
            check_version(protocol)?;
            if terms.munge.is_some() && !munge {
                return Err(WireError::MungeUnwanted);
            }
            Transcript {
                puller,
                agent: nonce,
                puller_wish: terms.encryption,
                agent_wish: encryption,
            }
        }
        _ => return Err(WireError::NoHello),
    };
    let mut own = match said.puller_wish.agree(said.agent_wish)? {
        true => Some(Exchange::begin(&key.derive(Purpose::Noise, &said))),
        false => None,
    };
    let request = Request::Proof {
        proof: key.derive(Purpose::PullerProof, &said),
        exchange: own.as_mut().map(Exchange::write).transpose()?,
    };
    link.send(&request, until)?;
    let exchange = match link.receive(HANDSHAKE_BYTES_MAX, until) {
        Ok(Reply::Welcome {
            proof: Some(proof),
            exchange,
            ..
        }) if key.verify(Purpose::AgentProof, &said, &proof) => exchange,
        // An agent says nothing to a wrong key.
        Ok(_) | Err(WireError::Ended) => return Err(refused),
        Err(error) => return Err(error),
    };
    if let Some(mut own) = own {
        own.read(&exchange.ok_or(WireError::WrongKey)?)?;
        link.seal(own.finish());
    }
    Ok(())
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
        let said = |puller: u8, agent: u8, agent_wish| Transcript {
            puller: [puller; 32],
            agent: [agent; 32],
            puller_wish: Encryption::Possible,
            agent_wish,
        };
        let puller = Purpose::PullerProof;
        let agent = Purpose::AgentProof;
        let all = said(1, 2, Encryption::Required);
        let proof = key.derive(puller, &all);
        assert!(key.verify(puller, &all, &proof));
        assert!(!key.verify(agent, &all, &proof), "sent back");
        assert!(!other.verify(puller, &all, &proof), "another key");
        for (what, other) in [
            ("nonces swapped", said(2, 1, Encryption::Required)),
            ("replayed", said(1, 3, Encryption::Required)),
            ("a wish changed", said(1, 2, Encryption::Possible)),
        ] {
            assert!(!key.verify(puller, &other, &proof), "{what}");
        }
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
