//! Interfaces whose other end is this program: IP packets that the kernel routes to one can be
//! read here, and what is written here the kernel takes as received
//! (Documentation/networking/tuntap.rst).
//!
//! Packets travel with the header of virtio-net (`struct virtio_net_hdr`), so that checksums and
//! the cutting of large segments are left to whoever puts them on a wire. A packet that was read
//! from one interface can be written to another as it is.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::errno::Errno;

use crate::error::{KernelError, Result, check};

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
/// `TUN_F_CSUM`, `TUN_F_TSO4`, `TUN_F_TSO6`.
const OFFLOADS: libc::c_ulong = 0x07;
/// Bytes of the header before each packet.
pub const HEADER_BYTES: usize = 10;
/// Bytes of the longest packet or frame, with its header.
pub const PACKET_BYTES_MAX: usize = HEADER_BYTES + 65_535 + 40;

/// One such interface. Closing it takes the interface away.
#[derive(Debug)]
pub struct Tun(OwnedFd);

impl Tun {
    /// Makes an interface, down, in the calling thread's network namespace (`CAP_NET_ADMIN`).
    pub fn create(name: &str) -> Result<Self> {
        Self::make(name, libc::IFF_TUN)
    }

    /// As [`Tun::create`], but whole Ethernet frames are read and written.
    pub fn create_tap(name: &str) -> Result<Self> {
        Self::make(name, libc::IFF_TAP)
    }

    fn make(name: &str, layer: libc::c_int) -> Result<Self> {
        if name.len() >= libc::IFNAMSIZ {
            return Err(KernelError::from_errno("make interface", libc::ENAMETOOLONG));
        }
        let fd = open()?;
        // `struct ifreq`: the name, then the flags in a union of 24 bytes.
        let mut request = [0u8; libc::IFNAMSIZ + 24];
        request[..name.len()].copy_from_slice(name.as_bytes());
        let kind = (layer | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as u16;
        request[libc::IFNAMSIZ..][..2].copy_from_slice(&kind.to_ne_bytes());
        // SAFETY: `request` has the size of the structure that TUNSETIFF reads and writes.
        let made = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) };
        check("make interface", made.into())?;
        // SAFETY: TUNSETOFFLOAD takes a number.
        let set = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, OFFLOADS) };
        check("leave checksums to the wire", set.into())?;
        Ok(Self(fd))
    }

    /// The next packet with its header, if there is one; how long it is. `into` should have
    /// [`PACKET_BYTES_MAX`] bytes.
    pub fn read(&self, into: &mut [u8]) -> Result<Option<usize>> {
        match nix::unistd::read(&self.0, into) {
            Ok(length) => Ok(Some(length)),
            Err(Errno::EAGAIN) => Ok(None),
            Err(errno) => Err(KernelError::from_errno("read a packet", errno as i32)),
        }
    }

    /// Gives the kernel a packet with its header. It may be lost, as on any network: when the
    /// interface is down, or nobody is there to take it.
    pub fn write(&self, packet: &[u8]) -> Result<()> {
        match nix::unistd::write(&self.0, packet) {
            Ok(_) => Ok(()),
            Err(errno) => Err(KernelError::from_errno("write a packet", errno as i32)),
        }
    }
}

fn open() -> Result<OwnedFd> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let opened = options.open("/dev/net/tun");
    opened.map(OwnedFd::from).map_err(KernelError::io("open /dev/net/tun (try `modprobe tun`)"))
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, UdpSocket};

    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::netlink::Netlink;
    use crate::segment::{Datagram, source};

    const OWN: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
    const OTHER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);

    /// Runs on a thread with a network of its own.
    fn talk() {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let tun = Tun::create("tun-test").unwrap();
        assert!(Tun::create("a-name-that-is-too-long").is_err());
        let mut netlink = Netlink::open().unwrap();
        let link = netlink.link("tun-test").unwrap().index;
        netlink.set_queue_length(link, 100).unwrap();
        netlink.add_address(link, OWN.into(), 32).unwrap();
        netlink.set_up(link, true).unwrap();
        netlink.add_route(Some((OTHER.into(), 32)), None, link).unwrap();
        let socket = UdpSocket::bind((OWN, 700)).unwrap();
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        socket.send_to(b"there", (OTHER, 900)).unwrap();
        // IPv6 looks for its routers, too.
        let mut is_there = false;
        while let Some(length) = tun.read(&mut buffer).unwrap() {
            let packet = &buffer[HEADER_BYTES..length];
            is_there |= source(packet) == Some(IpAddr::V4(OWN)) && packet.ends_with(b"there");
        }
        assert!(is_there);
        // An address that is withdrawn for a moment takes the interface down.
        netlink.set_up(link, false).unwrap();
        netlink.set_up(link, true).unwrap();
        while tun.read(&mut buffer).unwrap().is_some() {}
        let (from, to) = ((OTHER, 900).into(), (OWN, 700).into());
        let back = Datagram { from, to, payload: b"back" }.to_packet().unwrap();
        tun.write(&[&[0; HEADER_BYTES][..], &back].concat()).unwrap();
        let (length, peer) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..length], peer), (&b"back"[..], from));
    }

    #[test]
    fn packets_of_an_interface_are_read_and_written() {
        std::thread::spawn(talk).join().unwrap();
    }
}
