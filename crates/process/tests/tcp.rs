//! TCP connections that move from one host to another while their client looks on.

mod stage;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};

use hotspare_image::sockets::{TcpConnection, TcpState};
use hotspare_kernel::tcp;
use hotspare_process::objects::tcp::TcpCache;
use stage::{SECONDS, Stage, as_stream, both_ways, exchange, pattern};

fn an_idle_connection_survives(v6: bool) {
    let stage = Stage::new(v6);
    let listener = stage.listen();
    let (mut client, mut server) = stage.connect(&listener);
    both_ways(&mut client, &mut server);
    let images = stage.capture_all(&[server.as_fd(), listener.as_fd()]);
    let mut restored = stage.fail_over(images);
    let listener = TcpListener::from(restored.pop().expect("two"));
    let mut server = as_stream(restored.pop().expect("two"));
    assert_eq!(server.peer_addr().expect("peer"), client.local_addr().expect("bound"));
    both_ways(&mut client, &mut server);
    both_ways(&mut server, &mut client);
    let (mut client, mut server) = stage.connect(&listener);
    both_ways(&mut client, &mut server);
}

#[test]
fn an_idle_ipv4_connection_and_its_listener_survive() {
    an_idle_connection_survives(false);
}

#[test]
fn an_idle_ipv6_connection_and_its_listener_survive() {
    an_idle_connection_survives(true);
}

/// The Go runtime listens like this; clients that know no MPTCP get plain connections.
#[test]
fn an_mptcp_listener_and_its_plain_connection_survive() {
    use hotspare_image::sockets::SocketAddress;
    use hotspare_kernel::socket;
    for v6 in [false, true] {
        let stage = Stage::new(v6);
        let (family, address) = (stage.family(), SocketAddress::from(stage.address()));
        let listener = stage.lab.host(0).inside(move || {
            let fd =
                socket::create(family, libc::SOCK_STREAM, libc::IPPROTO_MPTCP).expect("create");
            let reuse = libc::SO_REUSEADDR;
            socket::set_option_i32(fd.as_fd(), libc::SOL_SOCKET, reuse, 1).expect("set");
            socket::bind(fd.as_fd(), &address.0).expect("bind");
            socket::listen(fd.as_fd(), 77).expect("listen");
            TcpListener::from(fd)
        });
        let (mut client, mut server) = stage.connect(&listener);
        both_ways(&mut client, &mut server);
        let images = stage.capture_all(&[server.as_fd(), listener.as_fd()]);
        assert_eq!(images[1].protocol, libc::IPPROTO_MPTCP);
        assert_eq!(images[1].state, TcpState::Listening { backlog: 77 });
        let mut restored = stage.fail_over(images);
        let listener = TcpListener::from(restored.pop().expect("two"));
        let mut server = as_stream(restored.pop().expect("two"));
        both_ways(&mut client, &mut server);
        let (mut client, mut server) = stage.connect(&listener);
        both_ways(&mut client, &mut server);
    }
}

/// The guest writes to a client that does not read until nothing fits; then the window is shut and
/// what was sent last cannot be sent again.
#[test]
fn a_connection_with_a_shut_window_goes_on_when_the_client_reads() {
    use hotspare_kernel::socket;
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, server) = stage.connect(&listener);
    server.set_nonblocking(true).expect("set");
    let block = pattern(1 << 20);
    let mut written = 0;
    // Until the buffers of both sides are full and stay so.
    while socket::poll_for(server.as_fd(), libc::POLLOUT, 100).expect("poll") != 0 {
        while let Ok(length) = (&server).write(&block[written % block.len()..]) {
            written += length;
        }
    }
    let images = stage.capture_all(&[server.as_fd()]);
    let mut restored = stage.fail_over(images);
    let mut server = as_stream(restored.remove(0));
    let mut received = vec![0; written];
    client.read_exact(&mut received).expect("read");
    for chunk in received.chunks(block.len()) {
        assert!(chunk == &block[..chunk.len()], "what the guest wrote");
    }
    both_ways(&mut client, &mut server);
}

#[test]
fn unread_bytes_are_read_on_the_spare() {
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, server) = stage.connect(&listener);
    let bytes = pattern(40_000);
    client.write_all(&bytes).expect("write");
    let deadline = std::time::Instant::now() + SECONDS;
    while hotspare_kernel::socket::unread_bytes(server.as_fd()).expect("measure") < bytes.len() {
        assert!(std::time::Instant::now() < deadline, "the bytes arrive");
        std::thread::yield_now();
    }
    let images = stage.capture_all(&[server.as_fd()]);
    let mut restored = stage.fail_over(images);
    let mut server = as_stream(restored.remove(0));
    let mut received = vec![0; bytes.len()];
    server.read_exact(&mut received).expect("read");
    assert_eq!(received, bytes);
    both_ways(&mut client, &mut server);
}

/// The guest has sent some bytes (`change` is told how many) that its client does not have, and
/// they arrive from the spare. How many segments it had to send again for a timeout.
fn unacknowledged(change: impl FnOnce(&mut TcpConnection, usize)) -> u32 {
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, mut server) = stage.connect(&listener);
    // The cable is out: the bytes stay in the send queue.
    stage.lab.client().link_down().expect("pull the client's cable");
    let bytes = pattern(9_000);
    server.write_all(&bytes).expect("write");
    let mut images = stage.capture_all(&[server.as_fd()]);
    let TcpState::Connected(connection) = &mut images[0].state else { panic!("connected") };
    change(connection, bytes.len());
    stage.lab.client().link_up().expect("plug in again");
    let mut restored = stage.fail_over(images);
    let mut server = as_stream(restored.remove(0));
    let mut received = vec![0; bytes.len()];
    client.read_exact(&mut received).expect("read");
    assert_eq!(received, bytes);
    both_ways(&mut client, &mut server);
    tcp::info(server.as_fd()).expect("look").sent_again
}

#[test]
fn unacknowledged_bytes_arrive_whether_or_not_the_client_has_them() {
    unacknowledged(|connection, bytes| {
        assert_eq!(connection.sent.len() + connection.unsent.len(), bytes);
    });
}

/// Its peer took back some of the room it had offered: what was sent is sent again all the same,
/// not counted as sent until a timeout, and another three times as long.
#[test]
fn what_was_sent_beyond_the_window_is_sent_again_at_once() {
    let sent_again = unacknowledged(|connection, bytes| {
        assert_eq!(connection.sent.len(), bytes);
        connection.window[1] = 4_000;
    });
    assert_eq!(sent_again, 0, "it came by a timeout");
}

/// A segment of which the client has a part, and has said so, stays whole in the send queue.
#[test]
fn bytes_are_captured_from_the_first_one_that_the_client_has_not() {
    const HAS: usize = 400;
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, mut server) = stage.connect(&listener);
    let bytes = pattern(1_000);
    server.write_all(&bytes[..HAS]).expect("write");
    client.read_exact(&mut [0; HAS]).expect("read");
    let mut images = stage.capture_all(&[server.as_fd()]);
    let TcpState::Connected(connection) = &mut images[0].state else { panic!("connected") };
    let known = HAS - connection.sent.len();
    connection.send_unacknowledged = connection.send_unacknowledged.wrapping_sub(known as u32);
    (connection.sent, connection.unsent) = (bytes.clone(), Vec::new());
    // What the spare says is lost at first; it hears the client.
    let (spare, client_host) = (stage.lab.host(1), stage.lab.client());
    let ip = |words: &[&str]| {
        let mut command = std::process::Command::new("ip");
        command.args(words);
        command
    };
    let link = spare.run(&mut ip(&["-o", "link", "show", "eth0"]), SECONDS).expect("look");
    let address = link.split_once("link/ether ").and_then(|(_, rest)| rest.split(' ').next());
    let (address, service) = (address.expect("an address"), stage.address().ip().to_string());
    let place = ["neigh", "replace", &service, "dev", "eth0", "lladdr", address];
    let place = [&place[..], &["nud", "permanent"]].concat();
    client_host.run(&mut ip(&place), SECONDS).expect("tell where the spare is");
    stage.lab.cut(spare, client_host).expect("cut");
    let mut restored = stage.fail_over(images);
    let mut server = as_stream(restored.remove(0));
    client.write_all(b"x").expect("write");
    server.read_exact(&mut [0; 1]).expect("read");
    let images = stage.capture_all(&[server.as_fd()]);
    let TcpState::Connected(connection) = &images[0].state else { panic!("connected") };
    let queued = [&connection.sent[..], &connection.unsent].concat();
    assert!(queued == bytes[HAS..], "{} bytes from another place", queued.len());
    stage.lab.heal().expect("mend");
    let mut received = vec![0; bytes.len() - HAS];
    client.read_exact(&mut received).expect("read");
    assert!(received == bytes[HAS..]);
}

#[test]
fn a_connection_whose_client_said_goodbye_still_answers() {
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, mut server) = stage.connect(&listener);
    client.write_all(b"last words").expect("write");
    client.shutdown(Shutdown::Write).expect("shut down");
    let mut words = [0; 10];
    server.read_exact(&mut words).expect("read");
    assert_eq!(server.read(&mut words).expect("end of file"), 0);
    let images = stage.capture_all(&[server.as_fd()]);
    let mut restored = stage.fail_over(images);
    let mut server = as_stream(restored.remove(0));
    assert_eq!(server.read(&mut words).expect("end of file"), 0);
    exchange(&mut server, &mut client, &pattern(10_000));
    drop(server);
    assert_eq!(client.read(&mut words).expect("end of file"), 0);
}

#[test]
fn a_connection_on_which_the_guest_said_goodbye_still_receives() {
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, mut server) = stage.connect(&listener);
    server.write_all(b"last words").expect("write");
    server.shutdown(Shutdown::Write).expect("shut down");
    let mut words = Vec::new();
    client.read_to_end(&mut words).expect("read");
    let images = stage.capture_all(&[server.as_fd()]);
    let mut restored = stage.fail_over(images);
    let mut server = as_stream(restored.remove(0));
    exchange(&mut client, &mut server, &pattern(10_000));
    drop(client);
    assert_eq!(server.read(&mut [0; 10]).expect("end of file"), 0);
}

#[test]
fn a_lost_connection_reads_as_reset_and_its_client_is_reset() {
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, server) = stage.connect(&listener);
    let mut images = stage.capture_all(&[server.as_fd()]);
    let TcpState::Connected(connection) = &images[0].state else { panic!("connected") };
    let remote = Some(connection.remote.clone());
    images[0].state = TcpState::Lost { reason: "a test".into(), remote };
    let mut restored = stage.fail_over(images);
    let mut server = as_stream(restored.remove(0));
    let error = server.read(&mut [0; 10]).expect_err("reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(server.read(&mut [0; 10]).expect("end of file"), 0);
    client.write_all(b"hello?").expect("the first write is taken");
    let error = client.read(&mut [0; 10]).expect_err("reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn options_of_a_listener_and_a_connection_survive() {
    use hotspare_kernel::socket::{get_option_i32, set_option_i32};
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (_client, server) = stage.connect(&listener);
    let wanted = [
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 33),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 4321),
        (libc::IPPROTO_IP, libc::IP_TOS, 16),
        (libc::SOL_SOCKET, libc::SO_PRIORITY, 5),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 7),
    ];
    for (level, name, value) in wanted {
        set_option_i32(server.as_fd(), level, name, value).expect("set");
    }
    set_option_i32(listener.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 50_000).expect("set");
    let read = |fd, level, name| get_option_i32(fd, level, name).expect("get");
    let buffer = read(listener.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF);
    let reuse = read(server.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR);
    let images = stage.capture_all(&[server.as_fd(), listener.as_fd()]);
    assert_eq!(read(server.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR), reuse);
    let restored = stage.fail_over(images);
    for (level, name, value) in wanted {
        assert_eq!(read(restored[0].as_fd(), level, name), value, "option {level}/{name}");
    }
    assert_eq!(read(restored[0].as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR), reuse);
    assert_eq!(read(restored[1].as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF), buffer);
    assert_eq!(read(restored[1].as_fd(), libc::IPPROTO_IP, libc::IP_TRANSPARENT), 0);
}

/// The guest's side stands still during each capture, as a stopped guest does; its peer goes on
/// at full speed. Every capture visits the connection anew (an empty cache).
#[test]
fn captures_do_not_disturb_connections_that_are_busy() {
    const BLOCKS: usize = 200;
    let stage = Stage::new(false);
    let listener = stage.listen();
    let pairs: Vec<_> = (0..4).map(|_| stage.connect(&listener)).collect();
    let (running, done) = (RwLock::new(()), AtomicBool::new(false));
    let block = &pattern(64 << 10);
    let guest_sends = |mut server: &TcpStream| {
        for chunk in std::iter::repeat_n(block, BLOCKS).flat_map(|block| block.chunks(8 << 10)) {
            let _running = running.read();
            server.write_all(chunk).expect("write");
        }
    };
    let guest_receives = |mut server: &TcpStream| {
        let mut bytes = vec![0; block.len()];
        for _ in 0..BLOCKS {
            let mut filled = 0;
            while filled < bytes.len() {
                let _running = running.read();
                filled += server.read(&mut bytes[filled..]).expect("read");
            }
            assert!(bytes == *block, "what the client sent");
        }
    };
    let client_does_both = |client: &TcpStream| {
        std::thread::scope(|scope| {
            let (mut writer, mut reader) = (client, client);
            scope.spawn(move || (0..BLOCKS).for_each(|_| writer.write_all(block).expect("write")));
            let mut bytes = vec![0; block.len()];
            for _ in 0..BLOCKS {
                reader.read_exact(&mut bytes).expect("read");
                assert!(bytes == *block, "what the guest sent");
            }
        });
    };
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let (mut alive, mut lost) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                let _stopped = running.write();
                for (_, server) in &pairs {
                    match stage.capture(server, &mut TcpCache::default()).state {
                        TcpState::Connected(_) => alive += 1,
                        TcpState::Lost { .. } => lost += 1,
                        other => panic!("{other:?}"),
                    }
                }
            }
            (alive, lost)
        });
        std::thread::scope(|scope| {
            for (client, server) in &pairs {
                scope.spawn(|| guest_sends(server));
                scope.spawn(|| guest_receives(server));
                scope.spawn(|| client_does_both(client));
            }
        });
        done.store(true, Ordering::Relaxed);
        let (alive, lost) = watcher.join().expect("captures succeed");
        println!("{alive} captures of a live connection, {lost} gave up");
        assert!(alive > 0);
    });
}
