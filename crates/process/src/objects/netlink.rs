//! AF_NETLINK sockets: glibc and the Go runtime open one for a moment to list interfaces.
//!
//! A question that is being answered cannot be moved, but it passes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use hotspare_image::sockets::{NetlinkSocket, SocketAddress, SocketOption};
use hotspare_kernel::socket;

use super::error::{ObjectError, ObjectResult};
use super::socket_options::{Moment, OptionReader, SocketKind, restore_options};

/// Most multicast groups of a family, bits.
const GROUPS_MAX: usize = 4096;

/// Captures a netlink socket of the stopped guest.
pub fn capture(
    fd: BorrowedFd<'_>,
    inode: u64,
    kind: SocketKind,
    options: &mut OptionReader,
) -> ObjectResult<NetlinkSocket> {
    let what = || format!("netlink socket of protocol {}", kind.protocol);
    if kind.protocol != libc::NETLINK_ROUTE && kind.protocol != libc::NETLINK_SOCK_DIAG {
        let reason = "only NETLINK_ROUTE and NETLINK_SOCK_DIAG sockets have no state elsewhere";
        return Err(ObjectError::refused(what(), reason));
    }
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    if socket::receive(fd, &mut [0; 1], flags)?.is_some() {
        return Err(ObjectError::transient(what(), "an answer waits in it"));
    }
    let address = socket::local_address(fd)?;
    let bound = address.get(4..).is_some_and(|rest| rest.iter().any(|byte| *byte != 0));
    let mut found = options.capture(fd, inode, kind, false)?;
    found.extend(memberships(fd)?);
    Ok(NetlinkSocket {
        protocol: kind.protocol,
        kind: kind.kind,
        local: bound.then_some(SocketAddress(address)),
        options: found,
    })
}

/// Multicast groups as options that join them again.
fn memberships(fd: BorrowedFd<'_>) -> ObjectResult<Vec<SocketOption>> {
    let mut bits = [0u8; GROUPS_MAX / 8];
    let (level, name) = (libc::SOL_NETLINK, libc::NETLINK_LIST_MEMBERSHIPS);
    let length = socket::get_option(fd, level, name, &mut bits)?.min(bits.len());
    let member = |group: &usize| bits[group / 8] & 1 << (group % 8) != 0;
    let join = |group| {
        let value = (group as u32 + 1).to_ne_bytes().to_vec();
        SocketOption { level, name: libc::NETLINK_ADD_MEMBERSHIP, value }
    };
    Ok((0..length * 8).filter(member).map(join).collect())
}

/// Restores it in the calling thread's network namespace. Its number (`nl_pid`) is kept.
pub fn restore(image: &NetlinkSocket) -> ObjectResult<OwnedFd> {
    let fd = socket::create(libc::AF_NETLINK, image.kind, image.protocol)?;
    restore_options(fd.as_fd(), &image.options, Moment::Created)?;
    if let Some(local) = &image.local {
        let mut address = local.0.clone();
        // Groups come back as options, all of them, not the first 32 only.
        address.get_mut(8..12).into_iter().for_each(|groups| groups.fill(0));
        let bound = socket::bind(fd.as_fd(), &address);
        bound.map_err(ObjectError::kernel("bind netlink socket"))?;
    }
    restore_options(fd.as_fd(), &image.options, Moment::InPlace)?;
    Ok(fd)
}
