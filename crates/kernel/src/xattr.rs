//! Extended attributes, by open descriptor (`O_PATH` descriptors included).
//!
//! The descriptor is named as `/proc/self/fd/N`: `fgetxattr(2)` and its family refuse `O_PATH`.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;

/// Longest value the kernel takes (`XATTR_SIZE_MAX`), bytes.
pub const XATTR_VALUE_BYTES_MAX: usize = 65536;

fn proc_path(fd: BorrowedFd<'_>) -> CString {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    CString::new(path).unwrap_or_else(|never| unreachable!("digits have no NUL: {never}"))
}

/// Runs `call(buffer, length)` with buffers that grow until the answer fits.
fn read_growing(call: impl Fn(*mut libc::c_void, usize) -> isize) -> nix::Result<Vec<u8>> {
    let mut buffer = vec![0u8; 256];
    loop {
        match Errno::result(call(buffer.as_mut_ptr().cast(), buffer.len())) {
            Ok(length) => {
                buffer.truncate(length as usize);
                return Ok(buffer);
            }
            Err(Errno::ERANGE) if buffer.len() < XATTR_VALUE_BYTES_MAX => {
                buffer.resize(buffer.len() * 4, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Value of attribute `name`. `ENODATA`: it is not set.
pub fn get_xattr(fd: impl AsFd, name: &CStr) -> nix::Result<Vec<u8>> {
    let path = proc_path(fd.as_fd());
    read_growing(|buffer, length| {
        // SAFETY: both strings end in NUL and `buffer` has room for `length` bytes.
        unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), buffer, length) }
    })
}

/// Name of the protocol of a socket of another process, as in `TCPv6` or `PACKET` (sockfs keeps it
/// as an attribute). Takes nothing and touches nothing.
pub fn socket_protocol(pid: crate::HostPid, number: i32) -> nix::Result<String> {
    let path = CString::new(format!("/proc/{pid}/fd/{number}"));
    let path = path.unwrap_or_else(|never| unreachable!("digits have no NUL: {never}"));
    let value = read_growing(|buffer, length| {
        let name = c"system.sockprotoname".as_ptr();
        // SAFETY: both strings end in NUL and `buffer` has room for `length` bytes.
        unsafe { libc::getxattr(path.as_ptr(), name, buffer, length) }
    })?;
    Ok(String::from_utf8_lossy(value.trim_ascii_end()).trim_end_matches('\0').to_owned())
}

/// Names of all attributes, each followed by a NUL.
pub fn list_xattrs(fd: impl AsFd) -> nix::Result<Vec<u8>> {
    let path = proc_path(fd.as_fd());
    read_growing(|buffer, length| {
        // SAFETY: the path ends in NUL and `buffer` has room for `length` bytes.
        unsafe { libc::listxattr(path.as_ptr(), buffer.cast(), length) }
    })
}

/// Sets attribute `name`; `flags` are 0, `XATTR_CREATE` or `XATTR_REPLACE`.
pub fn set_xattr(fd: impl AsFd, name: &CStr, value: &[u8], flags: i32) -> nix::Result<()> {
    let path = proc_path(fd.as_fd());
    // SAFETY: both strings end in NUL and `value` has the length given.
    let result = unsafe {
        libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags)
    };
    Errno::result(result).map(drop)
}

/// Removes attribute `name`. `ENODATA`: it is not set.
pub fn remove_xattr(fd: impl AsFd, name: &CStr) -> nix::Result<()> {
    let path = proc_path(fd.as_fd());
    // SAFETY: both strings end in NUL.
    let result = unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) };
    Errno::result(result).map(drop)
}
