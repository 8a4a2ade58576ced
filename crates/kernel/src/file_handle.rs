//! Opening files of a FUSE mount by inode number: `open_by_handle_at(2)`.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

/// `FILEID_INO64_GEN` of `include/linux/exportfs.h`: what `fs/fuse/inode.c` encodes.
const FILEID_INO64_GEN: i32 = 0x81;

/// `struct file_handle` with the three words of a FUSE handle.
#[repr(C)]
struct FuseHandle {
    handle_bytes: u32,
    handle_type: i32,
    inode_high: u32,
    inode_low: u32,
    generation: u32,
}

/// Opens inode `inode` (generation 0) of the FUSE file system that `mount` lies on, whether it
/// still has a name or not. `flags` are those of open(2) without `O_CREAT`. `mount` must not be an
/// `O_PATH` descriptor; the new file belongs to the same mount. Needs `CAP_DAC_READ_SEARCH`.
/// `ESTALE`: the file system does not know the inode.
pub fn open_fuse_inode(mount: BorrowedFd<'_>, inode: u64, flags: i32) -> nix::Result<OwnedFd> {
    let mut handle = FuseHandle {
        handle_bytes: 12,
        handle_type: FILEID_INO64_GEN,
        inode_high: (inode >> 32) as u32,
        inode_low: inode as u32,
        generation: 0,
    };
    // SAFETY: `handle` is laid out as the kernel's `struct file_handle` with `handle_bytes` bytes
    // of handle after the two words of header, and outlives the call.
    let fd = unsafe {
        libc::open_by_handle_at(
            mount.as_raw_fd(),
            (&raw mut handle).cast::<libc::file_handle>(),
            flags | libc::O_CLOEXEC,
        )
    };
    let fd = Errno::result(fd)?;
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_of_a_handle_is_laid_out_as_in_libc() {
        assert_eq!(size_of::<libc::file_handle>(), 8);
        assert_eq!(std::mem::offset_of!(FuseHandle, handle_type), 4);
        assert_eq!(std::mem::offset_of!(FuseHandle, inode_high), 8);
        assert_eq!(size_of::<FuseHandle>(), 20);
    }
}
