//! UDP sockets.
//!
//! Datagrams that wait unread travel with the socket. At restore they are sent again by a raw
//! socket, over the loopback interface, in the name of their sender: this is the only way to give
//! them a foreign sender's address. It is done as well as it can be (a socket bound to another
//! device does not get them): UDP promises nothing else.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use hotspare_image::sockets::{QueuedMessage, SocketAddress, UdpSocket};
use hotspare_kernel::segment::{Datagram, SegmentSender};
use hotspare_kernel::socket;

use super::error::{ObjectError, ObjectResult};
use super::socket_options::{Moment, OptionReader, SocketKind, option_value, restore_options};

/// Bytes of the longest datagram; with `UDP_GRO` several come as one.
const DATAGRAM_BYTES_MAX: usize = 128 << 10;
/// Most datagrams of one socket that travel.
const DATAGRAMS_MAX: usize = 4096;

/// Captures a UDP socket of the stopped guest.
pub fn capture(
    fd: BorrowedFd<'_>,
    family: i32,
    inode: u64,
    options: &mut OptionReader,
) -> ObjectResult<UdpSocket> {
    let local = SocketAddress(socket::local_address(fd)?);
    let bound = local.internet().is_some_and(|address| address.port() != 0);
    let remote = socket::peer_address(fd).ok().map(SocketAddress);
    let kind = SocketKind { domain: family, kind: libc::SOCK_DGRAM, protocol: libc::IPPROTO_UDP };
    let options = options.capture(fd, inode, kind, remote.is_some())?;
    let queue = queue(fd)?;
    Ok(UdpSocket { inode, family, local: bound.then_some(local), remote, queue, options })
}

fn queue(fd: BorrowedFd<'_>) -> ObjectResult<Vec<QueuedMessage>> {
    // POLLIN for a datagram with a wrong checksum is as good as none.
    if socket::poll_now(fd, libc::POLLIN)? & libc::POLLIN == 0 {
        return Ok(Vec::new());
    }
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEEK_OFF);
    let offset = socket::get_option_i32(fd, level, name)?;
    socket::set_option_i32(fd, level, name, 0)?;
    let mut queue = Vec::new();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let outcome = loop {
        match socket::receive_message(fd, DATAGRAM_BYTES_MAX, flags) {
            Ok(Some(message)) if queue.len() < DATAGRAMS_MAX => {
                let from = Some(SocketAddress(message.from));
                let bytes = message.bytes;
                queue.push(QueuedMessage { from, bytes, ..QueuedMessage::default() });
            }
            Ok(_) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    socket::set_option_i32(fd, level, name, offset)?;
    outcome?;
    Ok(queue)
}

/// Restores it in the calling thread's network namespace, where its address need not be yet.
pub fn restore(image: &UdpSocket) -> ObjectResult<OwnedFd> {
    let fd = socket::create(image.family, libc::SOCK_DGRAM, 0)?;
    let borrowed = fd.as_fd();
    let (generic, ip) = (libc::SOL_SOCKET, libc::IPPROTO_IP);
    socket::set_option_i32(borrowed, generic, libc::SO_REUSEADDR, 1)?;
    socket::set_option_i32(borrowed, ip, libc::IP_FREEBIND, 1)?;
    socket::set_option_i32(borrowed, ip, libc::IP_TRANSPARENT, 1)?;
    restore_options(borrowed, &image.options, Moment::Created)?;
    if let Some(local) = &image.local {
        let what = format!("bind UDP {:?}", local.internet());
        socket::bind(borrowed, &local.0).map_err(ObjectError::kernel(what))?;
    }
    if let Some(remote) = &image.remote {
        let what = format!("connect UDP to {:?}", remote.internet());
        socket::connect(borrowed, &remote.0).map_err(ObjectError::kernel(what))?;
    }
    for (level, name) in
        [(generic, libc::SO_REUSEADDR), (ip, libc::IP_FREEBIND), (ip, libc::IP_TRANSPARENT)]
    {
        let value = option_value(&image.options, level, name).unwrap_or(0);
        socket::set_option_i32(borrowed, level, name, value)?;
    }
    restore_options(borrowed, &image.options, Moment::InPlace)?;
    Ok(fd)
}

/// Delivers the datagrams that waited; how many could be sent. To be called when the service
/// address is there.
pub fn go_live(image: &UdpSocket, sender: &SegmentSender) -> usize {
    let Some(local) = image.local.as_ref().and_then(SocketAddress::internet) else { return 0 };
    let sent = image.queue.iter().filter(|message| {
        let from = message.from.as_ref().and_then(SocketAddress::internet);
        let Some(from) = from else { return false };
        let to = SocketAddr::new(reachable(local.ip(), from.ip()), local.port());
        let datagram = Datagram { from, to, payload: &message.bytes };
        sender.send_datagram(&datagram).unwrap_or(false)
    });
    sent.count()
}

/// An address of this host for a socket that listens on all of them.
fn reachable(local: IpAddr, from: IpAddr) -> IpAddr {
    let from_v4 = match from {
        IpAddr::V4(_) => true,
        IpAddr::V6(from) => from.to_ipv4_mapped().is_some(),
    };
    match (local.is_unspecified(), from_v4) {
        (false, _) => local,
        (true, true) => Ipv4Addr::LOCALHOST.into(),
        (true, false) => Ipv6Addr::LOCALHOST.into(),
    }
}
