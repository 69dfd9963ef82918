//! The handshake between two hosts: authenticates both sides and makes the keys of the connection.
//!
//! The *agent* is a process that serves the files of a mount to other hosts. The *puller* is a process on another host
//! that copies these files.
//!
//! The handshake is the Noise protocol NNpsk0 with a key that both sides have (psk). `e` is an ephemeral key, `ee` the
//! secret that both ephemeral keys yield. `encryption` is a side's statement about the encryption of files' bytes.
//!
//! ```text
//!   puller                                                            agent
//!     │── Hello {version, encryption, addresses, credential} │ e, psk ──►│
//!     │◄─────────── Welcome │ e, ee, {encryption, addresses, block key} ─│
//!     │── Ready, encrypted ─────────────────────────────────────────────►│
//! ```
//!
//! The shared key is the agent's key, or a new one within the credential of the hello ([`crate::munge`]). Over pipes it
//! is all zeros: ssh, which carries the pipes, has authenticated both ends, and the handshake only makes keys.
//!
//! Promises
//! * The key is never sent. A side without the key is not served, and learns only that its key is wrong.
//! * The whole hello is the prologue of the handshake. A change of any of its fields therefore ends the connection.
//! * A recorded handshake cannot be replayed. Each side adds an ephemeral key. An agent serves a puller only after a
//!   first message that is encrypted with the resulting keys.
//! * An agent reads at most [`HANDSHAKE_BYTES_MAX`] bytes at a time from a puller without the key. One deadline applies
//!   to the whole handshake.

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
use crate::message::{
    HANDSHAKE_BYTES_MAX, Hello, PROTOCOL_VERSION, PublicKey, Rejection, Reply, Request, Tag,
};
use crate::munge::Munge;
use crate::sealed::Exchange;
use crate::transport::Transport;

pub(crate) const KEY_BYTES: usize = 32;
/// Prefix of the prologue. With it, a handshake of another protocol or version is refused even if the key is the same.
const CONTEXT: &[u8] = b"firn-agent 6 ";
/// Shared key of connections over the pipes of ssh. It is not secret: ssh has authenticated both sides.
const FIXED_KEY_OVER_SSH: Key = Key([0; KEY_BYTES]);

/// The secret that agent and puller share: 256 random bits.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; KEY_BYTES]);

/// The inputs of one side to a handshake.
pub struct HandshakeInputs<'a> {
    /// The shared key; `None` if MUNGE or the connection itself identifies the other side.
    pub key: Option<&'a Key>,
    /// MUNGE. A puller uses it instead of a key. An agent accepts its credentials beside its own key.
    pub munge: Option<&'a Munge>,
    /// This side's addresses, and its statement about encryption.
    pub side: Side,
}

/// The payload of the agent's handshake message.
#[derive(Serialize, Deserialize)]
pub struct Agreement {
    /// The agent's addresses, and its statement about encryption.
    side: Side,
    /// Key that encrypts the bytes of files, or authenticates them if they are not encrypted.
    block_key: BlockKey,
}

impl<'a> HandshakeInputs<'a> {
    /// Makes the inputs for a TCP connection with a key.
    pub fn of_tcp(socket: &TcpStream, key: &'a Key, encrypt: Encrypt) -> io::Result<Self> {
        Ok(Self {
            key: Some(key),
            munge: None,
            side: Side::from_tcp(socket, encrypt)?,
        })
    }

    /// Makes the inputs for a connection over pipes. ssh, which carries them, has authenticated both ends.
    pub fn of_pipes() -> Self {
        Self {
            key: None,
            munge: None,
            side: Side::for_pipes(),
        }
    }
}

impl Key {
    /// Makes a new random key.
    pub fn random() -> Result<Self, getrandom::Error> {
        Ok(Self(random_bytes()?))
    }

    /// Reads a key in the form of [`Key::digits`]. Returns `None` for any other text.
    pub fn from_digits(digits: &str) -> Option<Self> {
        let bytes = mixed::decode_vec(digits).ok()?;
        bytes.try_into().ok().map(Self)
    }

    /// Returns the key in 64 hexadecimal digits.
    pub fn digits(&self) -> String {
        lower::encode_string(&self.0)
    }
}

/// Shows no byte of the key, so that no byte of it gets into a log.
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

fn random_error(error: getrandom::Error) -> WireError {
    WireError::Io(io::Error::other(error.to_string()))
}

// ---- the agent's side --------------------------------------------------------------------------

/// Carries out the agent's side of the handshake. Afterwards messages on `link` are encrypted.
pub fn answer_handshake<T: Transport>(
    link: &mut Link<T>,
    inputs: &HandshakeInputs<'_>,
    deadline: Instant,
) -> Result<(), WireError> {
    answer_handshake_with_hello_callback(link, inputs, deadline, &mut || {})
}

/// Carries out the agent's side of the handshake: the agent serves the files of a mount to the other side, the puller.
/// Afterwards messages on `link` are encrypted, and the puller has proved that it has the key.
///
/// Calls `on_hello` when a whole hello, the puller's first message, has arrived. An error ends the connection; the
/// puller is told the reason if it can act on it. `NoHello` means an unexpected message: first, or instead of `Ready`.
pub(crate) fn answer_handshake_with_hello_callback<T: Transport>(
    link: &mut Link<T>,
    inputs: &HandshakeInputs<'_>,
    deadline: Instant,
    on_hello: &mut dyn FnMut(),
) -> Result<(), WireError> {
    let hello = match receive_greeting(link, deadline) {
        Ok(Request::Hello(hello)) => hello,
        Ok(_) => return Err(WireError::NoHello),
        Err(error) => {
            send_rejection(link, &error, deadline)?;
            return Err(error);
        }
    };
    on_hello();
    if let Err(error) = accept_hello(link, inputs, &hello, deadline) {
        send_rejection(link, &error, deadline)?;
        return Err(error);
    }
    // A replayed handshake fails here: only the peer that made the ephemeral key can encrypt this message.
    match link.receive(HANDSHAKE_BYTES_MAX, deadline)? {
        Request::Ready => Ok(()),
        _ => Err(WireError::NoHello),
    }
}

/// Answers a hello, the first message of the puller (the side that copies files from this agent). Checks it, sends the
/// welcome with this side's part of the key exchange, and begins encryption.
///
/// A puller that does not have the shared key gets no welcome, and an error is returned.
fn accept_hello<T: Transport>(
    link: &mut Link<T>,
    inputs: &HandshakeInputs<'_>,
    hello: &Hello,
    deadline: Instant,
) -> Result<(), WireError> {
    let key = shared_key(inputs, hello, deadline)?;
    let mut exchange = Exchange::answer(&key.0, &prologue(hello));
    // Fails with `WrongKey` if the tag was not made with the shared key.
    exchange.read(&[&hello.nonce[..], &hello.tag].concat())?;
    let block_key = BlockKey::random().map_err(random_error)?;
    let agreement = Agreement {
        side: inputs.side,
        block_key: block_key.clone(),
    };
    let payload = serde_json::to_vec(&agreement).expect("an agreement is plain JSON");
    let welcome = Reply::Welcome {
        protocol: PROTOCOL_VERSION,
        handshake: lower::encode_string(&exchange.write(&payload)?),
    };
    link.send(&welcome, deadline)?;
    // Both sides make this check, so the agent sends the welcome first. Each side can then report which one must
    // change.
    let is_encrypted = inputs.side.negotiate_encryption(&puller_side(hello))?;
    link.seal(exchange.finish(), block_key, is_encrypted);
    Ok(())
}

/// Returns the key of the hello's credential. If the hello has none, returns the agent's own key.
fn shared_key(
    inputs: &HandshakeInputs<'_>,
    hello: &Hello,
    deadline: Instant,
) -> Result<Key, WireError> {
    match (&hello.credential, inputs.munge) {
        (Some(credential), Some(munge)) => munge.unwrap(credential, deadline),
        (Some(_), None) => Err(WireError::MungeUnwanted),
        (None, _) => Ok(inputs.key.unwrap_or(&FIXED_KEY_OVER_SSH).clone()),
    }
}

/// Sends the reason of a failed handshake to the puller, the side that asks for files, if the puller can act on it.
/// Otherwise sends nothing. The reply says no more about a wrong key than that it is wrong.
fn send_rejection<T: Transport>(
    link: &mut Link<T>,
    error: &WireError,
    deadline: Instant,
) -> Result<(), WireError> {
    let reason = match error {
        WireError::Version { .. } => Rejection::Version,
        WireError::MungeUnwanted => Rejection::Munge,
        WireError::WrongKey
        | WireError::NoMunge { .. }
        | WireError::Munge { .. }
        | WireError::OtherUser { .. } => Rejection::Key,
        // The puller detects these errors itself, or the connection has failed.
        _ => return Ok(()),
    };
    let rejected = Reply::Rejected {
        protocol: PROTOCOL_VERSION,
        reason,
    };
    link.send(&rejected, deadline)
}

// ---- the puller's side -------------------------------------------------------------------------

/// Carries out the puller's side of the handshake: the puller copies files from the other side, the agent. Afterwards
/// messages on `link` are encrypted, and the agent has proved that it has the key.
///
/// The shared key comes from `inputs`. With MUNGE (an authentication daemon on all hosts), the puller makes a new key
/// and sends it in a credential, which only the same user can decrypt.
pub fn begin_handshake<T: Transport>(
    link: &mut Link<T>,
    inputs: &HandshakeInputs<'_>,
    deadline: Instant,
) -> Result<(), WireError> {
    let (key, credential) = match inputs.munge {
        Some(munge) => {
            let new_key = Key::random().map_err(random_error)?;
            let credential = munge.wrap(&new_key, deadline)?;
            (new_key, Some(credential))
        }
        // Over ssh there is no shared secret: ssh has authenticated both sides, so a fixed known key is enough.
        None => (inputs.key.unwrap_or(&FIXED_KEY_OVER_SSH).clone(), None),
    };
    let mut hello = hello_without_exchange(inputs.side, credential);
    let mut exchange = Exchange::begin(&key.0, &prologue(&hello));
    let own_message = exchange.write(&[])?;
    // The hello carries this message of the key exchange in two fields: the ephemeral public key in `nonce` (the
    // field's name in the protocol), and the tag.
    let (public_key, tag) = own_message.split_at(hello.nonce.len());
    hello.nonce.copy_from_slice(public_key);
    hello.tag.copy_from_slice(tag);
    link.send(&Request::Hello(hello), deadline)?;

    let wrong_key = || match inputs.munge {
        Some(_) => WireError::CredentialRefused,
        None => WireError::WrongKey,
    };
    let agent_message = receive_welcome(link, &wrong_key, deadline)?;
    let payload = exchange.read(&agent_message).map_err(|_| wrong_key())?;
    let agreement: Agreement = decode_json(&payload)?;
    let is_encrypted = inputs.side.negotiate_encryption(&agreement.side)?;
    link.seal(exchange.finish(), agreement.block_key, is_encrypted);
    link.send(&Request::Ready, deadline)
}

/// Receives the welcome of the agent, the side that serves files, and returns the message of the key exchange in it. If
/// the agent has rejected the key, the error is `wrong_key()`.
fn receive_welcome<T: Transport>(
    link: &mut Link<T>,
    wrong_key: &dyn Fn() -> WireError,
    deadline: Instant,
) -> Result<Vec<u8>, WireError> {
    match receive_greeting(link, deadline)? {
        Reply::Welcome { handshake, .. } => {
            lower::decode_vec(handshake).map_err(|_| WireError::NoHello)
        }
        Reply::Rejected { reason, .. } => Err(match reason {
            Rejection::Munge => WireError::MungeUnwanted,
            Rejection::Key => wrong_key(),
            // If the agent had another version, `receive_greeting` would have returned that error.
            Rejection::Version => WireError::NoHello,
        }),
        _ => Err(WireError::NoHello),
    }
}

/// Makes a hello whose ephemeral key and tag are still zeros.
fn hello_without_exchange(side: Side, credential: Option<String>) -> Hello {
    Hello {
        protocol: PROTOCOL_VERSION,
        nonce: PublicKey::default(),
        tag: Tag::default(),
        encryption: side.encryption,
        here: side.here,
        there: side.there,
        credential,
    }
}

// ---- both sides --------------------------------------------------------------------------------

/// Returns the puller's addresses and its statement about encryption.
fn puller_side(hello: &Hello) -> Side {
    Side {
        encryption: hello.encryption,
        here: hello.here,
        there: hello.there,
    }
}

/// Returns the data that must be equal on both sides: the hello without its ephemeral key and tag, which Noise checks
/// itself.
fn prologue(hello: &Hello) -> Vec<u8> {
    let checked_fields = Hello {
        nonce: PublicKey::default(),
        tag: Tag::default(),
        ..hello.clone()
    };
    let mut prologue = CONTEXT.to_vec();
    serde_json::to_writer(&mut prologue, &checked_fields).expect("a hello is plain JSON");
    prologue
}

fn decode_json<M: DeserializeOwned>(json: &[u8]) -> Result<M, WireError> {
    serde_json::from_slice(json).map_err(|error| WireError::Nonsense(error.to_string()))
}

/// Receives an unencrypted message of the handshake, of at most [`HANDSHAKE_BYTES_MAX`] bytes. Its version is checked
/// before any other field, because another version may have other fields.
fn receive_greeting<M: DeserializeOwned>(
    link: &mut Link<impl Transport>,
    deadline: Instant,
) -> Result<M, WireError> {
    #[derive(Deserialize)]
    struct Versioned {
        protocol: u32,
    }
    let frame = link.receive_frame(HANDSHAKE_BYTES_MAX, deadline)?;
    if let Ok(Versioned { protocol }) = serde_json::from_slice(frame)
        && protocol != PROTOCOL_VERSION
    {
        return Err(WireError::Version { found: protocol });
    }
    decode_json(frame)
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

    /// Result of a handshake on both sides.
    struct Handshake {
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

    fn terms(key: &Key, side: Side) -> HandshakeInputs<'_> {
        HandshakeInputs {
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

    /// Carries out a handshake through a relay that may change the hello and the answer.
    fn shake_hands(
        puller: &HandshakeInputs<'_>,
        agent: &HandshakeInputs<'_>,
        on_hello: impl FnOnce(Vec<u8>) -> Vec<u8>,
        on_answer: impl FnOnce(Vec<u8>) -> Vec<u8>,
    ) -> Handshake {
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
            // All later messages are encrypted, and the relay passes them on unchanged.
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
            Handshake { puller, agent }
        })
    }

    /// Changes nothing.
    fn unchanged(frame: Vec<u8>) -> Vec<u8> {
        frame
    }

    #[test]
    fn only_a_peer_with_the_key_is_let_in() {
        let key = Key::random().unwrap();
        let other = Key::random().unwrap();
        let agent = terms(&key, agent_side());
        let handshake = shake_hands(&terms(&key, puller_side()), &agent, unchanged, unchanged);
        let (puller, agent_link) = (handshake.puller.unwrap(), handshake.agent.unwrap());
        assert!(!puller.is_encrypted() && !agent_link.is_encrypted());
        // Both sides have the same key for the MACs of blocks.
        let mac = |link: &Link<Stream>| {
            let mut hasher = link.block_hasher().unwrap();
            hasher.update(b"a block");
            hasher.finish()
        };
        assert_eq!(mac(&puller), mac(&agent_link));
        let handshake = shake_hands(&terms(&other, puller_side()), &agent, unchanged, unchanged);
        assert!(matches!(handshake.puller.err(), Some(WireError::WrongKey)));
        assert!(matches!(handshake.agent.err(), Some(WireError::WrongKey)));
        // A puller without any key.
        let keyless = HandshakeInputs {
            key: None,
            ..terms(&key, puller_side())
        };
        let handshake = shake_hands(&keyless, &agent, unchanged, unchanged);
        assert!(matches!(handshake.agent.err(), Some(WireError::WrongKey)));
    }

    /// Proves S-agent-18.
    #[test]
    fn a_change_on_the_way_ends_the_handshake() {
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
            let handshake = shake_hands(&puller, &agent, on_hello, unchanged);
            assert!(
                handshake.puller.is_err() && handshake.agent.is_err(),
                "{field}"
            );
        }
        for index in [0, 40, 90, 130, 200] {
            let on_answer = |answer| {
                edit(answer, |answer| {
                    let mut digits = answer["handshake"].as_str().unwrap().to_owned();
                    let changed = if &digits[index..=index] == "0" {
                        "1"
                    } else {
                        "0"
                    };
                    digits.replace_range(index..=index, changed);
                    answer["handshake"] = digits.into();
                })
            };
            let handshake = shake_hands(&puller, &agent, unchanged, on_answer);
            assert!(
                matches!(handshake.puller.err(), Some(WireError::WrongKey)),
                "{index}"
            );
            assert!(handshake.agent.is_err());
        }
    }

    #[test]
    fn a_replayed_handshake_lets_no_peer_in() {
        let key = Key::random().unwrap();
        let agent = terms(&key, agent_side());
        let mut recorded = None;
        let on_hello = |hello: Vec<u8>| {
            recorded = Some(hello.clone());
            hello
        };
        assert!(
            shake_hands(&terms(&key, puller_side()), &agent, on_hello, unchanged)
                .agent
                .is_ok()
        );
        // A peer without the key replays the hello. The hello is valid, so the agent answers it, but does not serve the
        // peer.
        let other = Key::random().unwrap();
        let replay = |_| recorded.unwrap();
        let handshake = shake_hands(&terms(&other, puller_side()), &agent, replay, unchanged);
        assert!(handshake.puller.is_err() && handshake.agent.is_err());
    }

    #[test]
    fn both_see_a_third_party_between_them_and_encrypt() {
        let key = Key::random().unwrap();
        let agent = terms(&key, side(Encryption::Possible, "10.0.0.2:6", "10.0.0.9:7"));
        let handshake = shake_hands(&terms(&key, puller_side()), &agent, unchanged, unchanged);
        let (puller, agent) = (handshake.puller.unwrap(), handshake.agent.unwrap());
        assert!(puller.is_encrypted() && agent.is_encrypted());
        assert!(puller.block_hasher().is_none());
        let agent = terms(&key, side(Encryption::Refused, "10.0.0.2:6", "10.0.0.9:7"));
        let handshake = shake_hands(&terms(&key, puller_side()), &agent, unchanged, unchanged);
        assert!(matches!(
            handshake.puller.err(),
            Some(WireError::PeerRefusesEncryption)
        ));
        assert!(matches!(
            handshake.agent.err(),
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
        let handshake = shake_hands(&puller, &agent, older, unchanged);
        assert!(matches!(
            handshake.agent.err(),
            Some(WireError::Version { found: 4 })
        ));
        // The answer of an agent of version 4, which ignores unknown fields of a hello.
        let challenge = |_| {
            br#"{"reply":"challenge","protocol":4,"nonce":[0],"encryption":"possible","munge":false}"#
                .to_vec()
        };
        let handshake = shake_hands(&puller, &agent, unchanged, challenge);
        assert!(matches!(
            handshake.puller.err(),
            Some(WireError::Version { found: 4 })
        ));
        let newer = |answer| {
            edit(answer, |answer| {
                answer["protocol"] = (PROTOCOL_VERSION + 1).into()
            })
        };
        let handshake = shake_hands(&puller, &agent, unchanged, newer);
        assert!(matches!(
            handshake.puller.err(),
            Some(WireError::Version { found }) if found == PROTOCOL_VERSION + 1
        ));
    }

    #[test]
    fn the_longest_messages_of_a_handshake_fit_into_its_frames() {
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
