//! Connections after a failover: what can go on does, what cannot is reset at once.

#[path = "../../process/tests/stage/mod.rs"]
mod stage;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::thread::JoinHandle;
use std::time::Instant;

use hotspare_image::objects::{FileId, FileOwner, Object, OpenFile};
use hotspare_image::sockets::{TcpSocket, TcpState};
use hotspare_kernel::netlink::Netlink;
use hotspare_kernel::packet_tap::PacketTap;
use hotspare_kernel::socket::outgoing_bytes;
use hotspare_net::callers::Callers;
use hotspare_net::go_live::{GoLiveWatch, Verdicts};
use stage::{SECONDS, Stage, as_stream, both_ways, exchange, pattern};

/// Fails over; the connections' new ends, and the watch at work.
fn fail_over(stage: &Stage, images: Vec<TcpSocket>) -> (Vec<TcpStream>, JoinHandle<Verdicts>) {
    fail_over_with(stage, images, Vec::new())
}

/// As [`fail_over`]; `callers` are connections that the primary told of.
fn fail_over_with(
    stage: &Stage,
    images: Vec<TcpSocket>,
    callers: Vec<(SocketAddr, SocketAddr)>,
) -> (Vec<TcpStream>, JoinHandle<Verdicts>) {
    let owner = FileOwner::default();
    let file = |image| OpenFile { id: FileId(0), flags: 0, owner, object: Object::Tcp(image) };
    let files: Vec<OpenFile> = images.iter().cloned().map(file).collect();
    // The lab takes its time to fail over.
    let open = move || {
        GoLiveWatch::open(&files, &callers, SECONDS / 5, false).expect("open").expect("connections")
    };
    let (restored, watch) = stage.fail_over_with(images, open);
    let watching = std::thread::spawn(move || watch.run(SECONDS).expect("watch"));
    (restored.into_iter().map(as_stream).collect(), watching)
}

fn is_reset(stream: &mut TcpStream) {
    let error = stream.read(&mut [0; 10]).expect_err("reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

fn verdicts(settled: usize, reset: usize) -> Verdicts {
    Verdicts { settled, reset, silent: 0 }
}

#[test]
fn idle_connections_are_settled_and_go_on() {
    for v6 in [false, true] {
        let stage = Stage::new(v6);
        let listener = stage.listen();
        let mut pairs: Vec<_> = (0..20).map(|_| stage.connect(&listener)).collect();
        for (client, server) in &mut pairs {
            both_ways(client, server);
        }
        let servers: Vec<_> = pairs.iter().map(|(_, server)| server.as_fd()).collect();
        let images = stage.capture_all(&servers);
        let (restored, watching) = fail_over(&stage, images);
        assert_eq!(watching.join().expect("watch"), verdicts(20, 0));
        for ((client, _), mut server) in pairs.iter_mut().zip(restored) {
            both_ways(client, &mut server);
        }
    }
}

#[test]
fn a_client_that_has_seen_lost_output_is_reset_without_speaking() {
    for v6 in [false, true] {
        let stage = Stage::new(v6);
        let listener = stage.listen();
        let (mut client, mut server) = stage.connect(&listener);
        both_ways(&mut client, &mut server);
        let images = stage.capture_all(&[server.as_fd()]);
        exchange(&mut server, &mut client, &pattern(1000));
        let (mut restored, watching) = fail_over(&stage, images);
        is_reset(&mut client);
        is_reset(&mut restored[0]);
        assert_eq!(watching.join().expect("watch"), verdicts(0, 1));
    }
}

#[test]
fn a_client_whose_request_is_lost_with_the_primary_is_reset() {
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, mut server) = stage.connect(&listener);
    both_ways(&mut client, &mut server);
    let images = stage.capture_all(&[server.as_fd()]);
    exchange(&mut client, &mut server, &pattern(1000));
    let deadline = Instant::now() + SECONDS;
    while outgoing_bytes(client.as_fd()).expect("measure") > 0 {
        assert!(Instant::now() < deadline, "the request is acknowledged");
        std::thread::yield_now();
    }
    let (mut restored, watching) = fail_over(&stage, images);
    is_reset(&mut client);
    is_reset(&mut restored[0]);
    assert_eq!(watching.join().expect("watch"), verdicts(0, 1));
}

#[test]
fn a_client_of_a_connection_that_no_checkpoint_knows_is_reset_without_speaking() {
    for v6 in [false, true] {
        let stage = Stage::new(v6);
        let listener = stage.listen();
        let (mut client, server) = stage.connect(&listener);
        let ends = (server.local_addr().expect("address"), server.peer_addr().expect("address"));
        client.write_all(b"is anybody there?").expect("write");
        let deadline = Instant::now() + SECONDS;
        while outgoing_bytes(client.as_fd()).expect("measure") > 0 {
            assert!(Instant::now() < deadline, "the request is acknowledged");
            std::thread::yield_now();
        }
        let (_, watching) = fail_over_with(&stage, Vec::new(), vec![ends]);
        is_reset(&mut client);
        assert_eq!(watching.join().expect("watch"), verdicts(0, 1));
    }
}

#[test]
fn the_door_sees_who_comes_and_goes() {
    for v6 in [false, true] {
        let stage = Stage::new(v6);
        let tap = stage.lab.host(0).inside(|| {
            let link = Netlink::open().expect("netlink").link("eth0").expect("eth0");
            PacketTap::open_door(link.index).expect("open")
        });
        let listener = stage.listen();
        let (mut client, mut server) = stage.connect(&listener);
        let ends = (server.local_addr().expect("address"), server.peer_addr().expect("address"));
        let mut callers = Callers::new(ends.0.ip());
        let mut look = |count: usize| {
            for _ in 0..count {
                let seen = tap.next(SECONDS.as_millis() as i32).expect("look");
                callers.note(&seen.expect("a packet").packet);
            }
            callers.open().collect::<Vec<_>>()
        };
        both_ways(&mut client, &mut server);
        assert_eq!(look(1), [ends], "SYN and ACK");
        drop(client);
        assert_eq!(look(1), [ends], "one end is done");
        drop(server);
        assert_eq!(look(1), [], "both are");
        assert!(tap.next(0).expect("look").is_none(), "nothing else was seen");
    }
}

#[test]
fn a_request_that_never_reached_the_primary_is_not_lost() {
    let stage = Stage::new(false);
    let listener = stage.listen();
    let (mut client, mut server) = stage.connect(&listener);
    both_ways(&mut client, &mut server);
    let images = stage.capture_all(&[server.as_fd()]);
    stage.lab.host(0).link_down().expect("pull the cable");
    client.write_all(b"is anybody there?").expect("write");
    let (mut restored, watching) = fail_over(&stage, images);
    let mut request = [0; 17];
    restored[0].read_exact(&mut request).expect("read");
    assert_eq!(&request, b"is anybody there?");
    both_ways(&mut client, &mut restored[0]);
    assert_eq!(watching.join().expect("watch"), verdicts(1, 0));
}

#[test]
fn the_quiet_client_of_a_connection_that_could_not_be_captured_is_reset() {
    for v6 in [false, true] {
        let stage = Stage::new(v6);
        let listener = stage.listen();
        let (mut client, server) = stage.connect(&listener);
        let mut images = stage.capture_all(&[server.as_fd()]);
        let TcpState::Connected(connection) = &images[0].state else { panic!("connected") };
        let remote = Some(connection.remote.clone());
        images[0].state = TcpState::Lost { reason: "a test".into(), remote };
        let (mut restored, watching) = fail_over(&stage, images);
        is_reset(&mut client);
        is_reset(&mut restored[0]);
        assert_eq!(watching.join().expect("watch"), verdicts(0, 1));
    }
}
