//! Two hosts and a client, and TCP connections that move between them.
#![allow(dead_code, reason = "each test uses a part")]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use hotspare_image::sockets::TcpSocket;
use hotspare_kernel::segment::SegmentSender;
use hotspare_kernel::socket::get_option_i32;
use hotspare_process::objects::socket_options::{OptionReader, SocketKind};
use hotspare_process::objects::tcp::{self, TcpCache};
use hotspare_torture::lab::Lab;

pub const SECONDS: Duration = Duration::from_secs(10);

/// Two hosts, a client, and the address that moves.
pub struct Stage {
    pub lab: Lab,
    cidr: &'static str,
    service: IpAddr,
}

impl Stage {
    pub fn new(v6: bool) -> Self {
        let cidr = if v6 { "fd77::50/64" } else { "10.77.0.50/24" };
        let service = cidr.split('/').next().and_then(|a| a.parse().ok()).expect("an address");
        let lab = Lab::new(2).expect("make a lab");
        lab.host(0).add_address(cidr).expect("add the service address");
        Self { lab, cidr, service }
    }

    pub fn listen(&self) -> TcpListener {
        let address = SocketAddr::new(self.service, 0);
        self.lab.host(0).inside(move || TcpListener::bind(address)).expect("listen")
    }

    /// A connection: the client's end, the guest's end.
    pub fn connect(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let address = listener.local_addr().expect("bound");
        let connect = move || TcpStream::connect_timeout(&address, SECONDS);
        let client = self.lab.client().inside(connect).expect("connect");
        client.set_read_timeout(Some(SECONDS)).expect("set timeout");
        let (server, _) = listener.accept().expect("accept");
        server.set_read_timeout(Some(SECONDS)).expect("set timeout");
        (client, server)
    }

    /// The service address, any port.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.service, 0)
    }

    pub fn family(&self) -> i32 {
        if self.service.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET }
    }

    pub fn capture(&self, socket: &impl AsFd, cache: &mut TcpCache) -> TcpSocket {
        let mut options = OptionReader::default();
        let inode = socket.as_fd().as_raw_fd() as u64;
        let protocol = libc::SO_PROTOCOL;
        let protocol = get_option_i32(socket.as_fd(), libc::SOL_SOCKET, protocol).expect("get");
        let kind = SocketKind { domain: self.family(), kind: libc::SOCK_STREAM, protocol };
        tcp::capture(socket.as_fd(), kind, inode, cache, &mut options).expect("capture")
    }

    pub fn capture_all<T: AsFd>(&self, sockets: &[T]) -> Vec<TcpSocket> {
        let mut cache = TcpCache::default();
        sockets.iter().map(|socket| self.capture(socket, &mut cache)).collect()
    }

    /// The primary falls silent, the sockets come to life on the spare.
    pub fn fail_over(&self, images: Vec<TcpSocket>) -> Vec<OwnedFd> {
        self.fail_over_with(images, || ()).0
    }

    /// As [`Stage::fail_over`]; `before` runs inside the spare before connections may speak.
    pub fn fail_over_with<T: Send + 'static>(
        &self,
        images: Vec<TcpSocket>,
        before: impl FnOnce() -> T + Send + 'static,
    ) -> (Vec<OwnedFd>, T) {
        self.lab.host(0).link_down().expect("pull the cable");
        let spare = self.lab.host(1);
        let to_restore = images.clone();
        let restored = spare.inside(move || {
            let sockets = to_restore.iter().map(|image| tcp::restore(image, 1000));
            sockets.collect::<Result<Vec<_>, _>>()
        });
        let restored = restored.expect("restore");
        spare.add_address(self.cidr).expect("take the address");
        let flush = ["neigh", "flush", "all"];
        let client = self.lab.client();
        client.run(Command::new("ip").args(flush), SECONDS).expect("forget the old host");
        spare.inside(move || {
            let before = before();
            let sender = SegmentSender::open().expect("raw sockets");
            for (image, socket) in images.iter().zip(&restored) {
                tcp::go_live(image, socket.as_fd()).expect("go live");
                tcp::say_goodbye(image, socket.as_fd(), Some(&sender)).expect("say goodbye");
            }
            (restored, before)
        })
    }
}

pub fn as_stream(fd: OwnedFd) -> TcpStream {
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(SECONDS)).expect("set timeout");
    stream
}

/// `length` bytes, different at each place.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 256) as u8).collect()
}

pub fn exchange(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) {
    let mut received = vec![0; bytes.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| from.write_all(bytes).expect("write"));
        to.read_exact(&mut received).expect("read");
    });
    assert_eq!(received, bytes);
}

pub fn both_ways(a: &mut TcpStream, b: &mut TcpStream) {
    exchange(a, b, &pattern(100_000));
    exchange(b, a, &pattern(70_001));
}
