//! Tests of a client's connection: replies that are not valid are refused, and a socket that firnd does not own is not
//! used.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use super::*;

/// Returns a client's connection and firnd's end of it.
fn pair() -> (Connection, Connection) {
    let flags = SocketFlags::CLOEXEC;
    let (client, firnd) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    [client, firnd]
        .map(|socket| Connection {
            socket: socket.into(),
        })
        .into()
}

fn send(firnd: &Connection, head: &[u8], data: &[u8]) {
    firnd.send_packet(head.into(), data.into(), None).unwrap();
}

#[test]
fn a_reply_that_is_not_whole_or_announces_more_than_it_has_is_refused() {
    let (client, firnd) = pair();
    let extent_bytes = size_of::<Extent>();
    let reply = |count| Reply {
        count,
        ..Reply::default()
    };
    let receive = |room: usize| {
        let mut extents = vec![MaybeUninit::<Extent>::uninit(); room];
        client.receive_reply(&mut Incoming::from(&mut extents[..]))
    };
    // The announced count, the bytes that follow, the room for extents, and whether the reply is valid.
    for (count, follow, room, is_whole) in [
        (0, 0, 0, true),
        (7, 0, 0, true),
        (0, 0, 3, true),
        (2, 2 * extent_bytes, 3, true),
        (3, 3 * extent_bytes, 3, true),
        (2, 2 * extent_bytes - 1, 3, false),
        (1, 2 * extent_bytes, 3, false),
        (4, 4 * extent_bytes, 3, false),
        (0, 1, 0, false),
        (u32::MAX, extent_bytes, 3, false),
    ] {
        send(&firnd, reply(count).as_bytes(), &vec![0; follow]);
        let expected = if is_whole {
            Ok(reply(count))
        } else {
            Err(CallError::NoReply)
        };
        assert_eq!(receive(room), expected, "{count} {follow} {room}");
    }
    send(&firnd, &reply(0).as_bytes()[..20], &[]);
    assert_eq!(receive(0), Err(CallError::NoReply));
    drop(firnd);
    assert_eq!(receive(0), Err(CallError::NoReply));
    let request = Request::new(Op::Lease, 0, 0);
    let sent = client.send_request(&request, &Payload::none());
    assert_eq!(sent, Err(CallError::NotSent));
}

#[test]
fn the_first_descriptor_comes_with_its_packet_and_the_others_are_closed() {
    let (client, firnd) = pair();
    let (mut read_end, write_end) = std::io::pipe().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let given = [write_end.as_fd(); 3];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&given)));
    let parts = [std::io::IoSlice::new(b"packet")];
    let flags = rustix::net::SendFlags::empty();
    rustix::net::sendmsg(&firnd, &parts, &mut control, flags).unwrap();
    drop(write_end);
    let mut bytes = [0; 10];
    let packet = client
        .receive_packet(&mut Incoming::from(&mut bytes[..]), &mut Incoming::none())
        .unwrap();
    assert_eq!(packet.len, 6);
    let received = packet.fd.unwrap();
    rustix::io::write(&received, b"x").unwrap();
    drop(received);
    // The pipe reports its end only once all copies of `write_end` are closed, including the three in the packet.
    let mut read = Vec::new();
    read_end.read_to_end(&mut read).unwrap();
    assert_eq!(read, b"x");
}

#[test]
fn bad_memory_ends_a_call_and_not_the_connection() {
    let (client, firnd) = pair();
    let request = Request::new(Op::Write, 1, 0);
    let bad = std::ptr::without_provenance_mut::<u8>(64);
    let payload = Payload {
        // SAFETY: nothing is mapped there.
        data: unsafe { Outgoing::from_raw(bad, 100) },
        ..Payload::none()
    };
    let sent = client.send_request(&request, &payload);
    assert_eq!(sent, Err(CallError::Fault));
    let reply = Reply {
        count: 1,
        ..Reply::default()
    };
    send(&firnd, reply.as_bytes(), b"x");
    // SAFETY: nothing is mapped there.
    let mut room = unsafe { Incoming::from_raw(bad, 100) };
    assert_eq!(client.receive_reply(&mut room), Err(CallError::Fault));
    send(&firnd, reply.as_bytes(), b"x");
    let mut byte = [0];
    let mut room = Incoming::from(&mut byte[..]);
    assert_eq!(client.receive_reply(&mut room), Ok(reply));
    assert_eq!(byte, *b"x");
}

#[test]
fn only_the_expected_user_is_connected_to_and_another_hears_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let mut token = Token::new_zeroed();
    let unreachable = Connection::connect(&token, 0).unwrap_err();
    assert_eq!(unreachable, ConnectError::Unreachable(Errno::INVAL));
    let name = path.as_os_str().as_encoded_bytes();
    token.socket[..name.len()].copy_from_slice(name);
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 10).unwrap();
    let listener = UnixListener::from(socket);
    let own = rustix::process::geteuid().as_raw();
    let refused = Connection::connect(&token, own + 1).unwrap_err();
    assert!(matches!(refused, ConnectError::Peer(_)), "{refused:?}");
    let mut heard = Vec::new();
    listener
        .accept()
        .unwrap()
        .0
        .read_to_end(&mut heard)
        .unwrap();
    assert_eq!(heard, b"");
    let connection = Connection::connect(&token, own).unwrap();
    connection.send_hello(None).unwrap();
    let mut firnd = listener.accept().unwrap().0;
    let mut hello = [0; size_of::<Request>()];
    firnd.read_exact(&mut hello).unwrap();
    let expected = Request::new(Op::Hello, 0, DATA_SOCKET_VERSION.into());
    assert_eq!(hello, expected.as_bytes());
    // An answer with neither an arena nor a descriptor is no hello.
    firnd.write_all(Reply::default().as_bytes()).unwrap();
    assert!(connection.receive_hello(&[0; 16]).is_none());
}
