# Install: the library, the public headers, find_package(gradgate) and pkg-config, and the program where it was built.
include(CMakePackageConfigHelpers)

install(TARGETS gradgate EXPORT gradgate_targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/gradgate DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_BINARY_DIR}/include/gradgate/version.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gradgate)
install(EXPORT gradgate_targets NAMESPACE gradgate:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gradgate)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/gradgate-config.cmake.in
  ${PROJECT_BINARY_DIR}/gradgate-config.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gradgate)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gradgate-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gradgate-config.cmake ${PROJECT_BINARY_DIR}/gradgate-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gradgate)

if(TARGET gradgate_mpi)
  install(TARGETS gradgate_mpi EXPORT gradgate_mpi_targets)
  install(EXPORT gradgate_mpi_targets NAMESPACE gradgate:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gradgate)
endif()

# Relative to the file's own place, so that an installed tree can be moved.
file(RELATIVE_PATH GRADGATE_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/gradgate.pc.in ${PROJECT_BINARY_DIR}/gradgate.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/gradgate.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET gradgate_program)
  install(TARGETS gradgate_program)
endif()
