//! The handshake: identifies both sides, and makes the keys that they go on with. Noise (NNpsk0) with a key that both
//! sides have.
//!
//! ```text
//!   puller                                                      agent
//!     │── Hello {version, wish, addresses, credential} │ e, psk ──►│
//!     │◄─────────── Welcome │ e, ee, {wish, addresses, block key} ─│
//!     │── Ready, encrypted ───────────────────────────────────────►│
//! ```
//!
//! The shared key (psk) is that of the agent, or one that came in the hello within a credential ([`crate::munge`]). Pipes
//! need none: what carries them (ssh) authenticates both ends, and the handshake only makes keys.
//!
//! Promises
//! * The key is never sent. A side without it is not believed, and learns only that its key is wrong.
//! * All of the hello is in the handshake: a change of a word of it, the wish for encryption, an address or the
//!   credential, ends the connection.
//! * A recorded handshake cannot be replayed: each side adds an ephemeral key, and an agent serves a puller only after the
//!   first message that is encrypted with the resulting keys.
//! * A puller that has not shown the key makes the agent read [`HANDSHAKE_BYTES_MAX`] bytes at a time, until one
//!   deadline for the whole handshake.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::time::Instant;

use base16ct::{lower, mixed};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::block_mac::BlockKey;
use crate::encryption::{Encrypt, Side};
use crate::error::WireError;
use crate::link::Link;
use crate::message::{HANDSHAKE_BYTES_MAX, Hello, PROTOCOL_VERSION, Rejection, Reply, Request};
use crate::munge::Munge;
use crate::sealed::Exchange;
use crate::transport::Transport;

pub(crate) const KEY_BYTES: usize = 32;
/// Tells this use of a key from all others.
const CONTEXT: &[u8] = b"firn-agent 6 ";
/// Key of a connection over pipes: no secret.
const PIPES: Key = Key([0; KEY_BYTES]);

/// What agent and puller both have.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; KEY_BYTES]);

/// By what one side goes in a handshake.
pub struct Terms<'a> {
    /// None: the connection itself, or MUNGE, identifies the other side.
    pub key: Option<&'a Key>,
    /// The puller's: instead of a key. The agent's: as well as one.
    pub munge: Option<&'a Munge>,
    /// What it says of the connection.
    pub side: Side,
}

/// What the agent says in its message of the handshake.
#[derive(Serialize, Deserialize)]
pub struct Agreement {
    /// What it says of the connection.
    side: Side,
    /// Encrypts bytes of files, or authenticates those that are not encrypted.
    block_key: BlockKey,
}

impl<'a> Terms<'a> {
    /// Over TCP, with a key.
    pub fn of_tcp(socket: &TcpStream, key: &'a Key, encrypt: Encrypt) -> io::Result<Self> {
        Ok(Self {
            key: Some(key),
            munge: None,
            side: Side::of_tcp(socket, encrypt)?,
        })
    }

    /// Over pipes whose carrier (ssh) has authenticated both ends.
    pub fn of_pipes() -> Self {
        Self {
            key: None,
            munge: None,
            side: Side::of_pipes(),
        }
    }
}

impl Key {
    /// A new one.
    pub fn random() -> Result<Self, getrandom::Error> {
        Ok(Self(random_bytes()?))
    }

    /// As [`Key::digits`] writes it.
    pub fn from_digits(digits: &str) -> Option<Self> {
        let bytes = mixed::decode_vec(digits).ok()?;
        bytes.try_into().ok().map(Self)
    }

    /// In hexadecimal.
    pub fn digits(&self) -> String {
        lower::encode_string(&self.0)
    }
}

/// Leaves the key out.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

pub(crate) fn random_bytes() -> Result<[u8; KEY_BYTES], getrandom::Error> {
    let mut bytes = [0; KEY_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

fn no_random(error: getrandom::Error) -> WireError {
    WireError::Io(io::Error::other(error.to_string()))
}

// ---- the agent's side --------------------------------------------------------------------------

/// The agent's side.
pub fn answer_handshake<T: Transport>(
    link: &mut Link<T>,
    terms: &Terms<'_>,
    deadline: Instant,
) -> Result<(), WireError> {
    answer_telling(link, terms, deadline, &mut || {})
}

/// [`answer_handshake`] that calls `heard` when the hello has come.
pub(crate) fn answer_telling<T: Transport>(
    link: &mut Link<T>,
    terms: &Terms<'_>,
    deadline: Instant,
    heard: &mut dyn FnMut(),
) -> Result<(), WireError> {
    let hello = match receive_greeting(link, deadline) {
        Ok(Request::Hello(hello)) => hello,
        Ok(_) => return Err(WireError::NoHello),
        Err(error @ WireError::Version { .. }) => return reject(link, error, deadline),
        Err(error) => return Err(error),
    };
    heard();
    match admit(link, terms, &hello, deadline) {
        Err(error) => reject(link, error, deadline),
        admitted => admitted,
    }?;
    // A recorded handshake that is replayed ends here: this message needs the new keys.
    match link.receive(HANDSHAKE_BYTES_MAX, deadline)? {
        Request::Ready => Ok(()),
        _ => Err(WireError::NoHello),
    }
}

fn admit<T: Transport>(
    link: &mut Link<T>,
    terms: &Terms<'_>,
    hello: &Hello,
    deadline: Instant,
) -> Result<(), WireError> {
    let wrapped = match (&hello.credential, terms.munge) {
        (Some(credential), Some(munge)) => Some(munge.unwrap(credential, deadline)?),
        (Some(_), None) => return Err(WireError::MungeUnwanted),
        (None, _) => None,
    };
    let key = wrapped.as_ref().or(terms.key).unwrap_or(&PIPES);
    let mut exchange = Exchange::answer(&key.0, &prologue(hello));
    exchange.read(&[&hello.nonce[..], &hello.tag].concat())?;
    let block_key = BlockKey::random().map_err(no_random)?;
    let agreement = Agreement {
        side: terms.side,
        block_key: block_key.clone(),
    };
    let agreement = serde_json::to_vec(&agreement).expect("it is plain JSON");
    let welcome = Reply::Welcome {
        protocol: PROTOCOL_VERSION,
        handshake: lower::encode_string(&exchange.write(&agreement)?),
    };
    link.send(&welcome, deadline)?;
    // After the answer: the puller, too, says which side has to give way.
    let is_encrypted = terms.side.agree(&side_of(hello))?;
    link.seal(exchange.finish(), block_key, is_encrypted);
    Ok(())
}

/// Tells a puller what it may do about it, where it may do anything.
fn reject<T: Transport>(
    link: &mut Link<T>,
    error: WireError,
    deadline: Instant,
) -> Result<(), WireError> {
    let reason = match error {
        WireError::Version { .. } => Some(Rejection::Version),
        WireError::MungeUnwanted => Some(Rejection::Munge),
        WireError::WrongKey
        | WireError::NoMunge { .. }
        | WireError::Munge { .. }
        | WireError::OtherUser { .. } => Some(Rejection::Key),
        _ => None,
    };
    if let Some(reason) = reason {
        let rejected = Reply::Rejected {
            protocol: PROTOCOL_VERSION,
            reason,
        };
        link.send(&rejected, deadline)?;
    }
    Err(error)
}

// ---- the puller's side -------------------------------------------------------------------------

/// The puller's side.
pub fn begin_handshake<T: Transport>(
    link: &mut Link<T>,
    terms: &Terms<'_>,
    deadline: Instant,
) -> Result<(), WireError> {
    let wrapped = match terms.munge {
        Some(munge) => {
            let key = Key::random().map_err(no_random)?;
            let credential = munge.wrap(&key, deadline)?;
            Some((key, credential))
        }
        None => None,
    };
    let (own_key, credential) = wrapped.unzip();
    let key = own_key.as_ref().or(terms.key).unwrap_or(&PIPES);
    let wrong_key = match &credential {
        Some(_) => || WireError::CredentialRefused,
        None => || WireError::WrongKey,
    };
    let Side {
        encryption,
        here,
        there,
    } = terms.side;
    let mut hello = Hello {
        protocol: PROTOCOL_VERSION,
        nonce: [0; 32],
        tag: [0; 16],
        encryption,
        here,
        there,
        credential,
    };
    let mut exchange = Exchange::begin(&key.0, &prologue(&hello));
    let message = exchange.write(&[])?;
    let (nonce, tag) = message.split_at(hello.nonce.len());
    hello.nonce.copy_from_slice(nonce);
    hello.tag.copy_from_slice(tag);
    link.send(&Request::Hello(hello), deadline)?;
    let handshake = match receive_greeting(link, deadline)? {
        Reply::Welcome { handshake, .. } => handshake,
        Reply::Rejected { reason, .. } => {
            return Err(match reason {
                Rejection::Munge => WireError::MungeUnwanted,
                Rejection::Key => wrong_key(),
                // It names the same one.
                Rejection::Version => WireError::NoHello,
            });
        }
        _ => return Err(WireError::NoHello),
    };
    let message = lower::decode_vec(handshake).map_err(|_| WireError::NoHello)?;
    let agreement = exchange.read(&message).map_err(|_| wrong_key())?;
    let agreement: Agreement = serde_json::from_slice(&agreement)
        .map_err(|error| WireError::Nonsense(error.to_string()))?;
    let is_encrypted = terms.side.agree(&agreement.side)?;
    link.seal(exchange.finish(), agreement.block_key, is_encrypted);
    link.send(&Request::Ready, deadline)
}

// ---- both --------------------------------------------------------------------------------------

/// The part of a hello that is said of a side.
fn side_of(hello: &Hello) -> Side {
    Side {
        encryption: hello.encryption,
        here: hello.here,
        there: hello.there,
    }
}

/// All of a hello but the message of the handshake, which is in the handshake anyhow.
fn prologue(hello: &Hello) -> Vec<u8> {
    let said = Hello {
        nonce: [0; 32],
        tag: [0; 16],
        ..hello.clone()
    };
    let mut prologue = CONTEXT.to_vec();
    serde_json::to_writer(&mut prologue, &said).expect("it is plain JSON");
    prologue
}

/// A message of the handshake; the other side's version is looked at before anything else of it.
fn receive_greeting<M: DeserializeOwned>(
    link: &mut Link<impl Transport>,
    deadline: Instant,
) -> Result<M, WireError> {
    #[derive(Deserialize)]
    struct Versioned {
        protocol: u32,
    }
    let frame = link.receive_frame(HANDSHAKE_BYTES_MAX, deadline)?;
    match serde_json::from_slice(frame) {
        Ok(Versioned { protocol }) if protocol != PROTOCOL_VERSION => {
            Err(WireError::Version { found: protocol })
        }
        _ => serde_json::from_slice(frame).map_err(|error| WireError::Nonsense(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::encryption::Encryption;
    use crate::transport::Stream;

    /// What both sides came to, each with its link.
    struct Met {
        puller: Result<Link<Stream>, WireError>,
        agent: Result<Link<Stream>, WireError>,
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    fn link(socket: UnixStream) -> Link<Stream> {
        let socket = OwnedFd::from(socket);
        let output = socket.try_clone().unwrap();
        Link::over(Stream::over_pipes(socket, output).unwrap())
    }

    fn side(encryption: Encryption, here: &str, there: &str) -> Side {
        Side {
            encryption,
            here: here.parse().ok(),
            there: there.parse().ok(),
        }
    }

    fn terms(key: &Key, side: Side) -> Terms<'_> {
        Terms {
            key: Some(key),
            munge: None,
            side,
        }
    }

    fn puller_side() -> Side {
        side(Encryption::Possible, "10.0.0.1:5", "10.0.0.2:6")
    }

    fn agent_side() -> Side {
        side(Encryption::Possible, "10.0.0.2:6", "10.0.0.1:5")
    }

    fn read_frame(from: &mut UnixStream) -> Option<Vec<u8>> {
        let mut length = [0; 4];
        from.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        from.read_exact(&mut frame).ok()?;
        Some(frame)
    }

    fn write_frame(to: &mut UnixStream, frame: &[u8]) {
        let length = (frame.len() as u32).to_be_bytes();
        let _ = to.write_all(&length).and_then(|()| to.write_all(frame));
    }

    fn edit(frame: Vec<u8>, edit: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
        let mut message = serde_json::from_slice(&frame).unwrap();
        edit(&mut message);
        serde_json::to_vec(&message).unwrap()
    }

    /// A handshake through a relay that changes hello and answer.
    fn meet(
        puller: &Terms<'_>,
        agent: &Terms<'_>,
        on_hello: impl FnOnce(Vec<u8>) -> Vec<u8>,
        on_answer: impl FnOnce(Vec<u8>) -> Vec<u8>,
    ) -> Met {
        let (puller_end, mut from_puller) = UnixStream::pair().unwrap();
        let (agent_end, mut from_agent) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let agent = scope.spawn(|| {
                let mut link = link(agent_end);
                answer_handshake(&mut link, agent, soon()).map(|()| link)
            });
            let puller = scope.spawn(|| {
                let mut link = link(puller_end);
                begin_handshake(&mut link, puller, soon()).map(|()| link)
            });
            let hello = on_hello(read_frame(&mut from_puller).unwrap());
            write_frame(&mut from_agent, &hello);
            if let Some(answer) = read_frame(&mut from_agent) {
                write_frame(&mut from_puller, &on_answer(answer));
            }
            // What comes then is encrypted: it goes as it is.
            let mut to_agent = from_agent.try_clone().unwrap();
            let mut from = from_puller.try_clone().unwrap();
            scope.spawn(move || {
                let _ = std::io::copy(&mut from, &mut to_agent);
                let _ = to_agent.shutdown(std::net::Shutdown::Both);
            });
            let puller = puller.join().unwrap();
            if puller.is_err() {
                let _ = from_puller.shutdown(std::net::Shutdown::Both);
            }
            let agent = agent.join().unwrap();
            let _ = from_puller.shutdown(std::net::Shutdown::Both);
            Met { puller, agent }
        })
    }

    fn same(frame: Vec<u8>) -> Vec<u8> {
        frame
    }

    #[test]
    fn only_a_peer_with_the_key_is_let_in() {
        let key = Key::random().unwrap();
        let other = Key::random().unwrap();
        let agent = terms(&key, agent_side());
        let met = meet(&terms(&key, puller_side()), &agent, same, same);
        let (puller, agent_link) = (met.puller.unwrap(), met.agent.unwrap());
        assert!(!puller.is_encrypted() && !agent_link.is_encrypted());
        // Both authenticate blocks alike.
        let mac = |link: &Link<Stream>| {
            let mut hasher = link.block_hasher().unwrap();
            hasher.update(b"a block");
            hasher.finish()
        };
        assert_eq!(mac(&puller), mac(&agent_link));
        let met = meet(&terms(&other, puller_side()), &agent, same, same);
        assert!(matches!(met.puller.err(), Some(WireError::WrongKey)));
        assert!(matches!(met.agent.err(), Some(WireError::WrongKey)));
        // A side without any.
        let none = Terms {
            key: None,
            ..terms(&key, puller_side())
        };
        let met = meet(&none, &agent, same, same);
        assert!(matches!(met.agent.err(), Some(WireError::WrongKey)));
    }

    /// Proves S-agent-18.
    #[test]
    fn what_is_changed_on_its_way_ends_the_handshake() {
        let key = Key::random().unwrap();
        let puller = terms(&key, puller_side());
        let agent = terms(&key, agent_side());
        for (field, value) in [
            ("encryption", "refused".into()),
            ("encryption", "required".into()),
            ("here", "10.0.0.9:5".into()),
            ("there", serde_json::Value::Null),
            ("credential", "MUNGE:x".into()),
            ("tag", vec![0; 16].into()),
            ("nonce", vec![9; 32].into()),
        ] {
            let on_hello = |hello| edit(hello, |hello| hello[field] = value);
            let met = meet(&puller, &agent, on_hello, same);
            assert!(met.puller.is_err() && met.agent.is_err(), "{field}");
        }
        for at in [0, 40, 90, 130, 200] {
            let on_answer = |answer| {
                edit(answer, |answer| {
                    let mut digits = answer["handshake"].as_str().unwrap().to_owned();
                    let flipped = if &digits[at..=at] == "0" { "1" } else { "0" };
                    digits.replace_range(at..=at, flipped);
                    answer["handshake"] = digits.into();
                })
            };
            let met = meet(&puller, &agent, same, on_answer);
            assert!(
                matches!(met.puller.err(), Some(WireError::WrongKey)),
                "{at}"
            );
            assert!(met.agent.is_err());
        }
    }

    #[test]
    fn what_was_recorded_lets_no_peer_in() {
        let key = Key::random().unwrap();
        let agent = terms(&key, agent_side());
        let mut heard = None;
        let on_hello = |hello: Vec<u8>| {
            heard = Some(hello.clone());
            hello
        };
        assert!(
            meet(&terms(&key, puller_side()), &agent, on_hello, same)
                .agent
                .is_ok()
        );
        // Replayed by a peer without the key: the hello is valid, so it is answered, but the peer is not served.
        let other = Key::random().unwrap();
        let again = |_| heard.unwrap();
        let met = meet(&terms(&other, puller_side()), &agent, again, same);
        assert!(met.puller.is_err() && met.agent.is_err());
    }

    #[test]
    fn both_see_a_third_party_between_them_and_encrypt() {
        let key = Key::random().unwrap();
        let agent = terms(&key, side(Encryption::Possible, "10.0.0.2:6", "10.0.0.9:7"));
        let met = meet(&terms(&key, puller_side()), &agent, same, same);
        let (puller, agent) = (met.puller.unwrap(), met.agent.unwrap());
        assert!(puller.is_encrypted() && agent.is_encrypted());
        assert!(puller.block_hasher().is_none());
        let agent = terms(&key, side(Encryption::Refused, "10.0.0.2:6", "10.0.0.9:7"));
        let met = meet(&terms(&key, puller_side()), &agent, same, same);
        assert!(matches!(
            met.puller.err(),
            Some(WireError::PeerRefusesEncryption)
        ));
        assert!(matches!(
            met.agent.err(),
            Some(WireError::PeerRequiresEncryption)
        ));
    }

    /// Proves S-agent-19.
    #[test]
    fn another_version_is_named_on_both_sides() {
        let key = Key::random().unwrap();
        let puller = terms(&key, puller_side());
        let agent = terms(&key, agent_side());
        let older = |hello| edit(hello, |hello| hello["protocol"] = 4.into());
        let met = meet(&puller, &agent, older, same);
        assert!(matches!(
            met.agent.err(),
            Some(WireError::Version { found: 4 })
        ));
        // What an agent of version 4 answers, which reads of a hello what it knows.
        let challenge = |_| {
            br#"{"reply":"challenge","protocol":4,"nonce":[0],"encryption":"possible","munge":false}"#
                .to_vec()
        };
        let met = meet(&puller, &agent, same, challenge);
        assert!(matches!(
            met.puller.err(),
            Some(WireError::Version { found: 4 })
        ));
        let newer = |answer| {
            edit(answer, |answer| {
                answer["protocol"] = (PROTOCOL_VERSION + 1).into()
            })
        };
        let met = meet(&puller, &agent, same, newer);
        assert!(matches!(
            met.puller.err(),
            Some(WireError::Version { found }) if found == PROTOCOL_VERSION + 1
        ));
    }

    #[test]
    fn the_messages_of_a_handshake_are_as_small_as_an_agent_reads_them() {
        let long = "[1111:2222:3333:4444:5555:6666:7777:8888]:65535";
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            nonce: [255; 32],
            tag: [255; 16],
            encryption: Encryption::Possible,
            here: long.parse().ok(),
            there: long.parse().ok(),
            credential: Some("x".repeat(crate::munge::CREDENTIAL_BYTES_MAX)),
        };
        let hello = serde_json::to_vec(&Request::Hello(hello)).unwrap();
        assert!(hello.len() <= HANDSHAKE_BYTES_MAX, "{}", hello.len());
        let agreement = Agreement {
            side: side(Encryption::Possible, long, long),
            block_key: serde_json::from_value(vec![255; 16].into()).unwrap(),
        };
        let agreement = serde_json::to_vec(&agreement).unwrap();
        let handshake = "0".repeat(2 * (agreement.len() + 48));
        let protocol = PROTOCOL_VERSION;
        let welcome = Reply::Welcome {
            protocol,
            handshake,
        };
        let welcome = serde_json::to_vec(&welcome).unwrap();
        assert!(welcome.len() <= HANDSHAKE_BYTES_MAX, "{}", welcome.len());
    }

    #[test]
    fn a_key_is_written_as_digits_and_read_again() {
        let key = Key::random().unwrap();
        assert_eq!(Key::from_digits(&key.digits()), Some(key.clone()));
        for digits in ["", "00", &"g".repeat(64), &"0".repeat(65), &"0".repeat(66)] {
            assert_eq!(Key::from_digits(digits), None, "{digits}");
        }
        assert!(!format!("{key:?}").contains(&key.digits()));
    }
}
