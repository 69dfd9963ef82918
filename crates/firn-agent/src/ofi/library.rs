//! Loads libfabric, once for the process, and lists its providers.
//!
//! The library is never unloaded. Lists that it allocates are freed by [`InfoList`].

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::IpAddr;
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

use crate::ofi::abi::{
    API_VERSION, EpAttr, FI_CONTEXT, FI_CONTEXT2, FI_EP_RDM, FI_MR_ALLOCATED, FI_MR_ENDPOINT,
    FI_MR_LOCAL, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_NUMERICHOST, FI_READ, FI_REMOTE_READ, FI_RMA,
    FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SOURCE, FI_THREAD_DOMAIN, Fabric, FabricAttr,
    Info,
};
use crate::ofi::error::OfiError;

const FILE: &CStr = c"libfabric.so.1";
/// Providers whose hardware answers reads without a processor of the host, the best first.
const HARDWARE: [&str; 7] = ["verbs", "cxi", "efa", "psm3", "psm2", "opx", "gni"];
/// Providers that reach no other host, or are unreliable. They are used only if an option names them.
const BY_NAME_ONLY: [&str; 4] = ["shm", "sm2", "udp", "net"];

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const Info,
    *mut *mut Info,
) -> c_int;

/// The exported functions of libfabric. All other functions are in tables of its objects.
pub struct Library {
    getinfo: GetInfo,
    dupinfo: unsafe extern "C" fn(*const Info) -> *mut Info,
    freeinfo: unsafe extern "C" fn(*mut Info),
    pub(crate) fabric:
        unsafe extern "C" fn(*mut FabricAttr, *mut *mut Fabric, *mut c_void) -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// A provider of libfabric that can read remote memory on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Full name with layers, such as `verbs;ofi_rxm`.
    pub name: String,
}

/// Whether the hardware of a provider answers reads without a processor of the host.
pub fn is_hardware(provider: &str) -> bool {
    HARDWARE.contains(&core_of(provider))
}

/// Whether this host has a device for such a provider. The function asks the kernel, because loading libfabric is slow.
pub fn has_devices() -> bool {
    let has_entries = |class: &&str| {
        let entries = std::fs::read_dir(format!("/sys/class/{class}"));
        entries.is_ok_and(|mut entries| entries.next().is_some())
    };
    ["infiniband", "cxi"].iter().any(has_entries)
}

/// Returns the name of a provider without its layers: `tcp` for `tcp;ofi_rxm`.
fn core_of(provider: &str) -> &str {
    provider.split(';').next().unwrap_or(provider)
}

impl Provider {
    /// Whether `wanted` is the provider's full name, or its name without layers.
    pub fn is_named(&self, wanted: &str) -> bool {
        self.name == wanted || core_of(&self.name) == wanted
    }

    /// Whether the provider may be chosen if no option names one.
    pub fn is_for_all(&self) -> bool {
        !BY_NAME_ONLY.contains(&core_of(&self.name))
    }
}

/// A list of entries that libfabric has allocated. Dropping it frees the list.
pub(crate) struct InfoList {
    library: &'static Library,
    first: NonNull<Info>,
}

// SAFETY: the list is plain memory that libfabric has allocated for its caller, and no thread owns it.
unsafe impl Send for InfoList {}

impl InfoList {
    /// Returns the first entry, which libfabric considers the best.
    pub(crate) fn first(&self) -> &Info {
        // SAFETY: libfabric has made the entry, and it is unchanged until this value is dropped.
        unsafe { self.first.as_ref() }
    }

    /// Returns a pointer to the first entry, for calls of libfabric.
    pub(crate) fn as_ptr(&self) -> *mut Info {
        self.first.as_ptr()
    }

    fn entries(&self) -> impl Iterator<Item = &Info> {
        std::iter::successors(Some(self.first()), |info| {
            // SAFETY: the pointer is null, or points to the next entry, which lives as long as the list.
            unsafe { info.next.as_ref() }
        })
    }
}

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: this library has made the list, and it is freed once.
        unsafe { (self.library.freeinfo)(self.first.as_ptr()) };
    }
}

/// Returns the name of an entry's provider.
pub(crate) fn provider_of(info: &Info) -> String {
    // SAFETY: the pointer is null, or points to a structure that lives as long as `info`.
    let name = unsafe { info.fabric_attr.as_ref() }.map_or(null_mut(), |attr| attr.prov_name);
    text(name)
}

/// Copies a C string. Returns an empty text for a null pointer.
fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: texts of libfabric and of the loader end with a zero.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn loader_error() -> OfiError {
    // SAFETY: dlerror(3) returns null, or a text that is valid until the next call of this thread.
    let why = unsafe { libc::dlerror() };
    OfiError::NoLibrary { why: text(why) }
}

impl Library {
    /// Loads libfabric, once for the whole process. A failure is stored, too.
    pub fn load() -> Result<&'static Self, OfiError> {
        static LOADED: OnceLock<Result<Library, OfiError>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            // SAFETY: loading runs libfabric's constructors, which change nothing of this program. The library is the
            // one that any program of this user would be linked with. It is never unloaded, so its threads and texts
            // remain valid.
            let handle = unsafe { libc::dlopen(FILE.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            let handle = NonNull::new(handle).ok_or_else(loader_error)?;
            // SAFETY: each function has the type of the field that it is stored in (rdma/fabric.h, rdma/fi_errno.h), in
            // every version of libfabric.so.1.
            unsafe {
                Ok(Self {
                    getinfo: std::mem::transmute::<*mut c_void, GetInfo>(symbol(
                        handle,
                        c"fi_getinfo",
                    )?),
                    dupinfo: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(*const Info) -> *mut Info,
                    >(symbol(handle, c"fi_dupinfo")?),
                    freeinfo: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Info)>(
                        symbol(handle, c"fi_freeinfo")?,
                    ),
                    fabric: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(
                            *mut FabricAttr,
                            *mut *mut Fabric,
                            *mut c_void,
                        ) -> c_int,
                    >(symbol(handle, c"fi_fabric")?),
                    strerror: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(c_int) -> *const c_char,
                    >(symbol(handle, c"fi_strerror")?),
                })
            }
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    /// Returns libfabric's text of an error. Calls of libfabric return the negated number of an error.
    pub(crate) fn describe(&self, error: isize) -> String {
        let number = i32::try_from(error.unsigned_abs()).unwrap_or(libc::EIO);
        // SAFETY: the function takes any number and returns a constant text.
        text(unsafe { (self.strerror)(number) })
    }

    /// Returns the providers of this host that can read remote memory, in the order in which they should be tried:
    /// hardware first.
    pub fn providers(&'static self) -> Vec<Provider> {
        let mut providers: Vec<Provider> = Vec::new();
        if let Ok(list) = self.info(None, None) {
            for info in list.entries() {
                let name = provider_of(info);
                if providers.iter().all(|provider| provider.name != name) {
                    providers.push(Provider { name });
                }
            }
        }
        providers.sort_by_key(|provider| {
            let core = core_of(&provider.name);
            let rank = HARDWARE.iter().position(|name| *name == core);
            (rank.unwrap_or(HARDWARE.len()), !provider.is_for_all())
        });
        providers
    }

    /// Returns libfabric's entries for a provider. If the provider uses IP addresses, the entries are those of the
    /// network interface with the address `near`.
    pub(crate) fn find(
        &'static self,
        provider: &str,
        near: Option<IpAddr>,
    ) -> Result<InfoList, OfiError> {
        let missing = |_| OfiError::NoProvider {
            wanted: provider.into(),
            found: self.names(),
        };
        let any = self.info(Some(provider), None).map_err(missing)?;
        let by_address = [FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6];
        if near.is_none() || !by_address.contains(&any.first().addr_format) {
            return Ok(any);
        }
        // The device of the provider may have other addresses than the TCP interface.
        Ok(self.info(Some(provider), near).unwrap_or(any))
    }

    /// Returns the names of all providers as one text, for an error message.
    fn names(&'static self) -> String {
        let names: Vec<_> = self
            .providers()
            .into_iter()
            .map(|provider| provider.name)
            .collect();
        if names.is_empty() {
            "none".into()
        } else {
            names.join(", ")
        }
    }

    /// Requests libfabric's entries of one provider or of all. If `near` is given, they are those near this address of
    /// the host.
    fn info(
        &'static self,
        provider: Option<&str>,
        near: Option<IpAddr>,
    ) -> Result<InfoList, isize> {
        let hints = self.hints(provider)?;
        let node = near.map(|address| CString::new(address.to_string()).expect("digits"));
        let (node, flags) = match &node {
            Some(node) => (node.as_ptr(), FI_SOURCE | FI_NUMERICHOST),
            None => (null(), 0),
        };
        let mut answer = null_mut();
        // SAFETY: libfabric has allocated the hints, the node is null or a text of C, and `InfoList` frees the answer.
        let code = unsafe {
            (self.getinfo)(
                API_VERSION,
                node,
                null(),
                flags,
                hints.as_ptr(),
                &mut answer,
            )
        };
        let first = NonNull::new(answer).ok_or(code as isize)?;
        let list = InfoList {
            library: self,
            first,
        };
        match code {
            0 => Ok(list),
            code => Err(code as isize),
        }
    }

    /// Makes the entry that describes what this program needs: reads of remote memory between endpoints of type RDM,
    /// which need no connection.
    fn hints(&'static self, provider: Option<&str>) -> Result<InfoList, isize> {
        let no_memory = -(libc::ENOMEM as isize);
        // SAFETY: with a null pointer fi_dupinfo allocates an empty entry and its parts.
        let first = NonNull::new(unsafe { (self.dupinfo)(null()) }).ok_or(no_memory)?;
        let list = InfoList {
            library: self,
            first,
        };
        // SAFETY: the entry was just made, and only this function uses it. Its parts are allocated with it, or null.
        unsafe {
            let info = &mut *list.first.as_ptr();
            info.caps = FI_RMA | FI_READ | FI_REMOTE_READ;
            info.mode = FI_CONTEXT | FI_CONTEXT2;
            let endpoint: &mut EpAttr = info.ep_attr.as_mut().ok_or(no_memory)?;
            endpoint.kind = FI_EP_RDM;
            let domain = info.domain_attr.as_mut().ok_or(no_memory)?;
            domain.threading = FI_THREAD_DOMAIN;
            domain.mr_mode =
                FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
            let fabric = info.fabric_attr.as_mut().ok_or(no_memory)?;
            if let Some(provider) = provider {
                let name = CString::new(provider).map_err(|_| -(libc::EINVAL as isize))?;
                // libfabric frees the name with free(3).
                fabric.prov_name = libc::strdup(name.as_ptr());
            }
        }
        Ok(list)
    }
}

/// Looks up a function of a loaded library.
///
/// # Safety
/// `handle` is that of a loaded library.
unsafe fn symbol(handle: NonNull<c_void>, name: &CStr) -> Result<*mut c_void, OfiError> {
    // SAFETY: the library is loaded, and the name ends with a zero.
    let address = unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) };
    if address.is_null() {
        return Err(loader_error());
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_is_named_with_or_without_its_layers() {
        let provider = Provider {
            name: "verbs;ofi_rxm".into(),
        };
        assert!(provider.is_named("verbs") && provider.is_named("verbs;ofi_rxm"));
        assert!(!provider.is_named("ofi_rxm") && !provider.is_named("verb"));
        assert!(is_hardware("verbs;ofi_rxm") && is_hardware("cxi"));
        assert!(!is_hardware("tcp;ofi_rxm") && !is_hardware("shm") && !is_hardware(""));
    }
}
